"""One answer as servers of each form of API send it, with what only they say; and what clients read in it."""

import json
from typing import Any

from tests.gateway.surfaces.dialects import Said, completion
from tests.gateway.surfaces.native_upstream import CHAT, EVENTS, LINES, MESSAGES, OLLAMA, RESPONSES, Given

SAID = Said("It is sunny.", "Let me see.", (("look", '{"city": "Bern"}'),), "tool_calls", 12, 8, 5)
_ARGUMENTS = '{"city": "Bern"}'
_USAGE = {
    "input_tokens": 4,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 8,
    "output_tokens": 5,
    "service_tier": "standard",
}
MESSAGE: dict[str, Any] = {
    "id": "msg_01",
    "type": "message",
    "role": "assistant",
    "model": "mock",
    "content": [
        {"type": "thinking", "thinking": "Let me see.", "signature": "c2lnbmVk"},
        {"type": "text", "text": "It is sunny.", "citations": None},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Bern"}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": _USAGE,
}


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


def _block(index: int, begun: dict[str, Any], *deltas: dict[str, Any]) -> bytes:
    start = _event("content_block_start", index=index, content_block=begun)
    pieces = b"".join(_event("content_block_delta", index=index, delta=delta) for delta in deltas)
    return start + pieces + _event("content_block_stop", index=index)


MESSAGE_STREAM = b"".join(
    (
        _event("message_start", message={**MESSAGE, "content": [], "stop_reason": None}),
        _event("ping"),
        _block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "Let me "},
            {"type": "thinking_delta", "thinking": "see."},
            {"type": "signature_delta", "signature": "c2lnbmVk"},
        ),
        _block(
            1,
            {"type": "text", "text": ""},
            {"type": "text_delta", "text": "It is "},
            {"type": "text_delta", "text": "sunny."},
        ),
        _block(
            2,
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}},
            {"type": "input_json_delta", "partial_json": '{"city": '},
            {"type": "input_json_delta", "partial_json": '"Bern"}'},
        ),
        _event(
            "message_delta",
            delta={"stop_reason": "tool_use", "stop_sequence": None},
            usage={"output_tokens": 5},
        ),
        _event("message_stop"),
    )
)

_REASONING: dict[str, Any] = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Let me see."}],
    "encrypted_content": "c2VjcmV0",
}
_TEXT: dict[str, Any] = {"type": "output_text", "text": "It is sunny.", "annotations": [], "logprobs": []}
_MESSAGE_ITEM: dict[str, Any] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [_TEXT],
}
_CALL_ITEM: dict[str, Any] = {
    "id": "fc_1",
    "type": "function_call",
    "call_id": "call_1",
    "name": "look",
    "arguments": _ARGUMENTS,
    "status": "completed",
}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1_700_000_000,
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "instructions": "Be short.",
    "max_output_tokens": 64,
    "model": "mock",
    "output": [_REASONING, _MESSAGE_ITEM, _CALL_ITEM],
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": "low", "summary": None},
    "temperature": 0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "usage": {
        "input_tokens": 12,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    },
    "metadata": {},
}


def _response_stream() -> bytes:
    begun = {**RESPONSE, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": {**_REASONING, "content": []}}),
        ("response.output_item.done", {"output_index": 0, "item": _REASONING}),
        (
            "response.output_item.added",
            {"output_index": 1, "item": {**_MESSAGE_ITEM, "status": "in_progress", "content": []}},
        ),
    ]
    at = {"item_id": "msg_1", "output_index": 1, "content_index": 0}
    events += [
        ("response.content_part.added", {**at, "part": {**_TEXT, "text": ""}}),
        ("response.output_text.delta", {**at, "delta": "It is ", "logprobs": []}),
        ("response.output_text.delta", {**at, "delta": "sunny.", "logprobs": []}),
        ("response.output_text.done", {**at, "text": "It is sunny.", "logprobs": []}),
        ("response.content_part.done", {**at, "part": _TEXT}),
        ("response.output_item.done", {"output_index": 1, "item": _MESSAGE_ITEM}),
        (
            "response.output_item.added",
            {"output_index": 2, "item": {**_CALL_ITEM, "arguments": "", "status": "in_progress"}},
        ),
    ]
    at = {"item_id": "fc_1", "output_index": 2}
    events += [
        ("response.function_call_arguments.delta", {**at, "delta": _ARGUMENTS}),
        ("response.function_call_arguments.done", {**at, "arguments": _ARGUMENTS, "name": "look"}),
        ("response.output_item.done", {"output_index": 2, "item": _CALL_ITEM}),
        ("response.completed", {"response": RESPONSE}),
    ]
    return b"".join(_event(kind, **fields, sequence_number=number) for number, (kind, fields) in enumerate(events))


RESPONSE_STREAM = _response_stream()

_HEAD = {"model": "mock", "created_at": "2026-01-01T00:00:00.123456789Z"}
_OLLAMA_CALL = {"id": "call_1", "function": {"index": 0, "name": "look", "arguments": {"city": "Bern"}}}
_END: dict[str, Any] = {
    "done": True,
    "done_reason": "stop",
    "total_duration": 5,
    "load_duration": 1,
    "prompt_eval_count": 12,
    "prompt_eval_duration": 2,
    "eval_count": 5,
    "eval_duration": 2,
}
OLLAMA_ANSWER: dict[str, Any] = {
    **_HEAD,
    "message": {
        "role": "assistant",
        "content": "It is sunny.",
        "thinking": "Let me see.",
        "tool_calls": [_OLLAMA_CALL],
    },
    **_END,
}
_LINES: list[dict[str, Any]] = [
    {**_HEAD, "message": {"role": "assistant", "content": "", "thinking": "Let me "}, "done": False},
    {**_HEAD, "message": {"role": "assistant", "content": "", "thinking": "see."}, "done": False},
    {**_HEAD, "message": {"role": "assistant", "content": "It is "}, "done": False},
    {**_HEAD, "message": {"role": "assistant", "content": "sunny."}, "done": False},
    {**_HEAD, "message": {"role": "assistant", "content": "", "tool_calls": [_OLLAMA_CALL]}, "done": False},
    {**_HEAD, "message": {"role": "assistant", "content": ""}, **_END},
]
OLLAMA_STREAM = b"".join(json.dumps(line).encode() + b"\n" for line in _LINES)

_COMPLETION = completion(
    {
        "content": "It is sunny.",
        "reasoning_content": "Let me see.",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "look", "arguments": _ARGUMENTS}}],
    },
    "tool_calls",
    cached=8,
)


def _chunks() -> bytes:
    choice, usage = _COMPLETION["choices"][0], _COMPLETION["usage"]
    head = {**_COMPLETION, "object": "chat.completion.chunk"}
    del head["usage"]
    call = {**choice["message"]["tool_calls"][0], "index": 0}
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Let me see."},
        {"content": "It is sunny."},
        {"tool_calls": [call]},
    ]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
    chunks.append({**head, "choices": [], "usage": usage})
    return b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"


# Written with white space, as no gateway would write it again by itself.
PLAIN = {
    CHAT: Given(json.dumps(_COMPLETION, indent=1).encode()),
    MESSAGES: Given(json.dumps(MESSAGE, indent=1).encode()),
    RESPONSES: Given(json.dumps(RESPONSE, indent=1).encode()),
    OLLAMA: Given(json.dumps(OLLAMA_ANSWER, indent=1).encode()),
}
STREAMS = {
    CHAT: Given(_chunks(), EVENTS),
    MESSAGES: Given(MESSAGE_STREAM, EVENTS),
    RESPONSES: Given(RESPONSE_STREAM, EVENTS),
    OLLAMA: Given(OLLAMA_STREAM, LINES),
}
