"""Random answers: messages as Anthropic's API has them, and chat completions as servers have them."""

import json
from typing import Any

from hypothesis import strategies as st

from gateway.surfaces.messages.answers import CHAT
from tests.cache.entries.test_answer_round_trip import (
    chat_choices,
    merged,
    optional,
    texts,
    tool_calls,
    unknown_fields,
    usages,
    values,
)

Json = dict[str, Any]

inputs = st.dictionaries(texts | st.just("__raw"), values, max_size=3)
counts = st.integers(0, 9999)
callers = st.just({"type": "direct"}) | st.builds(
    lambda tool: {"type": "code_execution_20250825", "tool_id": tool}, texts
)
citations = st.fixed_dictionaries(
    {"type": st.just("char_location"), "cited_text": texts, "document_index": counts, "start_char_index": counts},
    optional={"document_title": st.none() | texts, "file_id": st.none()},
)


def block(kind: str, known: Json, **others: st.SearchStrategy[Any]) -> st.SearchStrategy[Json]:
    return st.fixed_dictionaries({"type": st.just(kind), **known}, optional=others)


def call(kind: str) -> st.SearchStrategy[Json]:
    return block(kind, {"id": texts, "name": texts, "input": inputs}, caller=callers, toolset_name=st.none() | texts)


search_results = st.fixed_dictionaries(
    {"type": st.just("web_search_result"), "url": texts, "title": texts, "encrypted_content": texts},
    optional={"page_age": st.none() | texts},
)
executions = st.fixed_dictionaries(
    {"type": st.just("code_execution_result"), "stdout": texts, "return_code": counts, "content": st.just([])}
)
blocks = st.one_of(
    block("text", {"text": texts}, citations=st.none() | st.lists(citations, max_size=2)),
    block("thinking", {"thinking": texts, "signature": texts}),
    block("redacted_thinking", {"data": texts}),
    call("tool_use"),
    call("server_tool_use"),
    block("mcp_tool_use", {"id": texts, "name": texts, "server_name": texts, "input": inputs}),
    block(
        "web_search_tool_result",
        {"tool_use_id": texts, "content": st.lists(search_results, max_size=2) | values},
        caller=callers,
    ),
    block("code_execution_tool_result", {"tool_use_id": texts, "content": executions}),
    block("container_upload", {"file_id": texts}),
    block("compaction", {"content": st.none() | texts}, encrypted_content=st.none() | texts),
    merged(block("text", {"text": texts}), unknown_fields),
    block("some_later_block", {}, content=values, text=values, input=values),
)
usual_blocks = st.tuples(
    st.lists(block("thinking", {"thinking": texts, "signature": texts}), max_size=1),
    st.lists(block("text", {"text": texts}), max_size=1),
    st.lists(block("tool_use", {"id": texts, "name": texts, "input": inputs}), max_size=3),
).map(lambda parts: [made for part in parts for made in part])

stop_reasons = st.sampled_from(
    ["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "model_context_window_exceeded"]
)
message_usages = st.fixed_dictionaries(
    {"input_tokens": counts, "output_tokens": counts},
    optional={
        "cache_creation_input_tokens": st.none() | counts,
        "cache_read_input_tokens": st.none() | counts,
        "cache_creation": st.none() | st.just({"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 3}),
        "output_tokens_details": st.none() | st.builds(lambda count: {"thinking_tokens": count}, counts),
        "server_tool_use": st.none() | st.just({"web_search_requests": 1, "web_fetch_requests": 0}),
        "service_tier": st.sampled_from(["standard", "priority", None]),
    },
)
# Hypothesis also tries names that it finds in the sources.
KNOWN = {"stop_sequence", "stop_details", "container", "context_management", CHAT}
messages = merged(
    unknown_fields.filter(lambda fields: not KNOWN & fields.keys()),
    st.fixed_dictionaries(
        {
            "id": texts.map(lambda text: f"msg_{text}") | texts,
            "type": st.just("message"),
            "role": st.just("assistant"),
            "model": texts,
            "content": usual_blocks | st.lists(blocks, max_size=5),
            "stop_reason": stop_reasons,
        }
    ),
    optional(
        stop_sequence=st.none() | texts,
        stop_details=st.none() | st.just({"type": "refusal", "category": "cyber", "explanation": None}),
        usage=message_usages,
        container=st.none() | st.just({"id": "container_1", "expires_at": "2026-01-01T00:00:00Z"}),
        context_management=st.just({"applied_edits": []}),
    ),
)
json_calls = st.lists(
    st.builds(
        lambda name, tool_input, spaced: {
            "id": name,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(tool_input, separators=None if spaced else (",", ":"))},
        },
        texts,
        inputs,
        st.booleans(),
    ),
    max_size=3,
)
thinking_blocks = st.lists(
    block("thinking", {"thinking": texts, "signature": texts}) | block("redacted_thinking", {"data": texts}),
    max_size=3,
)


@st.composite
def chat_answers(draw: st.DrawFn) -> Json:
    """Chat completions with every field that servers are known to send, and unknown ones."""
    choices = [draw(chat_choices(index)) for index in range(draw(st.integers(1, 2)))]
    message = choices[0]["message"]
    message |= draw(optional(tool_calls=json_calls | tool_calls, thinking_blocks=thinking_blocks))
    choices[0] |= draw(optional(stop_reason=st.none() | texts | counts))
    return {
        "id": draw(texts),
        "object": "chat.completion",
        "created": draw(st.integers(0, 2**40)),
        "model": draw(texts),
        "choices": choices,
        **draw(optional(usage=usages, system_fingerprint=st.none() | texts, service_tier=st.none() | texts)),
        **draw(unknown_fields),
    }
