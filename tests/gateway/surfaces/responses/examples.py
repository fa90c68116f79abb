"""Chat completions, Response objects, requests and streams for tests, as strategies and as single examples."""

import json
from typing import Any

from hypothesis import strategies as st

from gateway.http.sse import EventSplitter, event_data, event_json
from gateway.surfaces.responses.surface import ResponsesSurface
from gateway.surfaces.surface import ChatRequest
from tests.cache.entries.test_answer_round_trip import (
    chat_choices,
    long_texts,
    merged,
    optional,
    texts,
    tool_calls,
    unknown_fields,
    usages,
    values,
)

Json = dict[str, Any]

SURFACE = ResponsesSurface()
PATH = "/v1/responses"


def asked(**fields: Any) -> ChatRequest:
    return SURFACE.chat_request(PATH, {"model": "m", "input": "hello", **fields})


@st.composite
def chats(draw: st.DrawFn) -> Json:
    """Chat completions as they may come, with everything that servers add to them."""
    custom = st.fixed_dictionaries(
        {"id": texts, "type": st.just("custom"), "custom": st.fixed_dictionaries({"name": texts, "input": long_texts})}
    )
    citations = st.lists(
        st.fixed_dictionaries(
            {
                "type": st.just("url_citation"),
                "url_citation": st.fixed_dictionaries(
                    {"start_index": st.integers(0, 9), "end_index": st.integers(0, 9), "title": texts, "url": texts},
                    optional={"note": values},
                ),
            }
        ),
        max_size=2,
    )
    choices = [draw(chat_choices(index)) for index in range(draw(st.integers(1, 2)))]
    choices[0]["message"].update(draw(optional(annotations=citations, tool_calls=st.lists(custom, max_size=2))))
    choices[0]["finish_reason"] = draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter", "eos"]))
    return {
        "id": draw(texts),
        "object": "chat.completion",
        "created": draw(st.integers(0, 2**40)),
        "model": draw(texts),
        "choices": choices,
        **draw(optional(usage=usages, system_fingerprint=st.none() | texts, service_tier=st.none() | texts)),
        **draw(unknown_fields),
    }


ids = st.text("abc123_", min_size=1, max_size=8)
counts = st.integers(0, 2**31)
statuses = st.sampled_from(["completed", "incomplete", "in_progress"])
response_tokens = st.fixed_dictionaries(
    {
        "token": texts,
        "logprob": st.floats(-50, 0),
        "bytes": st.lists(st.integers(0, 255), max_size=4),
        "top_logprobs": st.lists(
            st.fixed_dictionaries({"token": texts, "logprob": st.floats(-9, 0), "bytes": st.just([1])}), max_size=2
        ),
    }
)
annotations = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("url_citation"), "start_index": counts, "end_index": counts, "title": texts, "url": texts}
    ),
    st.fixed_dictionaries({"type": st.just("file_citation"), "file_id": ids, "filename": texts, "index": counts}),
)
parts = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("output_text"), "text": long_texts, "annotations": st.lists(annotations, max_size=2)},
        optional={"logprobs": st.none() | st.lists(response_tokens, max_size=3)},
    ),
    st.fixed_dictionaries({"type": st.just("refusal"), "refusal": texts}),
)


def item(kind: str, required: Json, further: Json | None = None) -> st.SearchStrategy[Json]:
    fields: Json = {"type": st.just(kind), "id": ids, **required}
    return st.fixed_dictionaries(fields, optional=further or {})


messages = item(
    "message",
    {"role": st.just("assistant"), "status": statuses, "content": st.lists(parts, max_size=3)},
    {"phase": st.none() | st.sampled_from(["commentary", "final_answer"])},
)
reasoning = item(
    "reasoning",
    {"summary": st.lists(st.fixed_dictionaries({"type": st.just("summary_text"), "text": long_texts}), max_size=2)},
    {
        "content": st.none()
        | st.lists(st.fixed_dictionaries({"type": st.just("reasoning_text"), "text": long_texts}), max_size=2),
        "encrypted_content": st.none() | texts,
        "status": statuses,
    },
)
function_calls = item(
    "function_call", {"call_id": ids, "name": texts, "arguments": texts, "status": statuses}, {"namespace": texts}
)
custom_calls = item("custom_tool_call", {"call_id": ids, "name": texts, "input": texts})
built_in_items = st.one_of(
    item("web_search_call", {"status": statuses, "action": st.just({"type": "search", "query": "q"})}),
    item("file_search_call", {"status": statuses, "queries": st.lists(texts, max_size=2)}, {"results": st.none()}),
    item("image_generation_call", {"status": statuses, "result": st.none() | texts}),
    item(
        "code_interpreter_call",
        {"status": statuses, "container_id": ids, "code": st.none() | texts, "outputs": st.none()},
    ),
    item("mcp_call", {"server_label": texts, "name": texts, "arguments": texts}, {"output": st.none() | texts}),
    item("mcp_list_tools", {"server_label": texts, "tools": st.just([])}),
    item("mcp_approval_request", {"server_label": texts, "name": texts, "arguments": texts}),
    item(
        "local_shell_call",
        {"call_id": ids, "status": statuses, "action": st.just({"type": "exec", "command": ["ls"], "env": {}})},
    ),
    item("compaction", {"encrypted_content": texts}),
)


@st.composite
def natives(draw: st.DrawFn) -> Json:
    """Response objects as servers give them that have the API themselves."""
    status = draw(st.sampled_from(["completed", "incomplete"]))
    reason = draw(st.sampled_from(["max_output_tokens", "content_filter"]))
    output = st.lists(messages | reasoning | function_calls | custom_calls | built_in_items, max_size=5)
    return {
        "id": draw(st.text("abc", min_size=1).map("resp_".__add__)),
        "object": "response",
        "created_at": draw(counts | st.floats(0, 2e9)),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": reason} if status == "incomplete" else None,
        "model": draw(texts),
        "output": draw(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **draw(
            optional(
                usage=st.none() | response_usages,
                instructions=st.none() | texts,
                metadata=st.dictionaries(texts, texts, max_size=2),
                previous_response_id=st.none() | ids,
                service_tier=st.none() | st.sampled_from(["default", "flex"]),
                store=st.booleans(),
                temperature=st.none() | st.floats(0, 2),
                text=st.just({"format": {"type": "text"}}),
                truncation=st.just("disabled"),
            )
        ),
        **draw(unknown_fields.map(lambda fields: {name: value for name, value in fields.items() if name != "output"})),
    }


response_usages = st.fixed_dictionaries(
    {
        "input_tokens": counts,
        "input_tokens_details": st.fixed_dictionaries({"cached_tokens": counts, "cache_write_tokens": counts}),
        "output_tokens": counts,
        "output_tokens_details": st.fixed_dictionaries({"reasoning_tokens": counts}),
        "total_tokens": counts,
    }
)


@st.composite
def tidy_chats(draw: st.DrawFn) -> Json:
    """Chat completions that say nothing but what OpenAI's own do, and reasoning."""
    message = draw(
        merged(
            st.fixed_dictionaries({"role": st.just("assistant"), "content": st.none() | long_texts}),
            optional(
                reasoning_content=long_texts,
                refusal=texts,
                tool_calls=st.lists(
                    st.fixed_dictionaries(
                        {
                            "type": st.just("function"),
                            "function": st.fixed_dictionaries(
                                {"name": st.text("fg_", min_size=1), "arguments": st.sampled_from(['{"a": "b"}', "{}"])}
                            ),
                        }
                    ),
                    max_size=3,
                ),
            ),
        )
    )
    for number, call in enumerate(message.get("tool_calls", ())):
        call["id"] = f"call_{number}"
    choice = {"index": 0, "message": message, "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls"]))}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [choice],
        **draw(optional(usage=usages)),
    }


def pieces_of(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def deltas_of(draw: st.DrawFn, message: Json) -> list[list[Json]]:
    """The message as deltas, a list for each field and each call, in the order in which models write them."""
    runs: list[list[Json]] = [
        [{field: piece} for piece in pieces_of(draw, message[field])]
        for field in ("reasoning_content", "content", "refusal")
        if isinstance(message.get(field), str)
    ]
    for index, call in enumerate(message.get("tool_calls") or ()):
        kind, argument = ("custom", "input") if call["type"] == "custom" else ("function", "arguments")
        first, *rest = pieces_of(draw, call[kind][argument])
        begun = {"index": index, **call, kind: {**call[kind], argument: first}}
        runs.append([{"tool_calls": [begun]}, *({"tool_calls": [{"index": index, kind: {argument: p}}]} for p in rest)])
    return runs


@st.composite
def chunk_streams(draw: st.DrawFn, answers: st.SearchStrategy[Json], shuffled: bool) -> list[Json]:
    """Chunks of a chat completion; if `shuffled`, those of its fields and calls in any order."""
    answer = draw(answers)
    choice = answer["choices"][0]
    runs = deltas_of(draw, choice["message"])
    if shuffled:
        order = draw(st.permutations([number for number, run in enumerate(runs) for _ in run]))
        deltas = [runs[number].pop(0) for number in order]
    else:
        deltas = [delta for run in runs for delta in run]
    base = {name: answer[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    said = [{"index": 0, "delta": {"role": "assistant", "content": draw(st.sampled_from(["", None]))}}]
    said += [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    said += [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]
    chunks = [{**base, "choices": [one]} for one in said]
    return [*chunks, {**base, "choices": [], "usage": answer.get("usage")}]


def events_of(stream: bytes) -> list[Json]:
    """The events of a stream of Responses, each framed as it must be."""
    splitter = EventSplitter()
    events = [event_json(event_data(event)) for event in splitter.feed(stream)]
    assert splitter.rest == b""
    lines = stream.split(b"\n")
    assert [line for line in lines if line.startswith(b"event: ")] == [b"event: " + e["type"].encode() for e in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


__all__ = ["long_texts", "texts", "tool_calls", "unknown_fields", "values"]
