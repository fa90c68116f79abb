"""An answer comes back from the other form as it was, and says what clients of that form expect."""

import json
from typing import Any

import pytest
from anthropic.types import Message
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from cache.errors import UnstorableAnswer
from gateway.surfaces.messages.answers import CHAT, NATIVE
from gateway.surfaces.messages.surface import MessagesSurface
from gateway.surfaces.surface import ChatRequest
from tests.cache.entries.test_answer_round_trip import values
from tests.gateway.surfaces.messages.answer_examples import chat_answers, messages

Json = dict[str, Any]

SURFACE = MessagesSurface()
ASKED = ChatRequest({})


def own(answer: Json) -> Json:
    return SURFACE.own_answer(answer, ASKED, "public.0123")


def completion(message: Json, finish_reason: str = "stop", **fields: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], **fields}


def native(content: list[Json], stop_reason: str = "end_turn", **fields: Any) -> Json:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {"input_tokens": 1, "output_tokens": 2},
        **fields,
    }


def exactly(value: Any) -> str:
    """Tells 1, 1.0 and true apart, which are equal in Python."""
    return json.dumps(value, sort_keys=True)


@given(chat_answers())
@settings(max_examples=60, deadline=None)
def test_a_chat_completion_comes_back_from_its_message(answer: Json) -> None:
    """Logprobs, further choices, unknown fields and the very text of arguments are not lost, and nothing is changed."""
    before = exactly(answer)
    message = own(answer)
    Message.model_validate(message)
    assert exactly(SURFACE.chat_answer(message)) == before
    assert exactly(answer) == before, "the answer was changed"
    assert own(SURFACE.chat_answer(message)) == message


@given(messages)
@settings(max_examples=60, deadline=None)
def test_a_message_comes_back_from_its_chat_completion(message: Json) -> None:
    """Blocks of every kind in any order, citations, containers and unknown fields are not lost."""
    before = exactly(message)
    answer = SURFACE.chat_answer(message)
    ChatCompletion.model_validate(answer)
    assert exactly(own(answer)) == before
    assert exactly(message) == before, "the message was changed"


@given(st.dictionaries(st.sampled_from(["id", "choices", "usage", "model", NATIVE, "x"]), values) | chat_answers())
@settings(max_examples=50, deadline=None)
def test_any_object_comes_back_from_its_message(answer: Json) -> None:
    """An odd answer of a server is a message too, and is not lost."""
    answer |= {NATIVE: {"content": [5]}} if "x" in answer else {}
    assert exactly(SURFACE.chat_answer(own(answer))) == exactly(answer)
    SURFACE.own_stream(own(answer), ASKED)


def test_a_usual_answer() -> None:
    """Thoughts, text and calls are blocks in this order, and tokens that were cached are counted apart."""
    answer = completion(
        {
            "content": "I look.",
            "reasoning": "Weather, then.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
                {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}},
            ],
        },
        "tool_calls",
        usage={
            "prompt_tokens": 10,
            "completion_tokens": 7,
            "total_tokens": 17,
            "prompt_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
    )
    message = own(answer)
    patch = message.pop(CHAT)
    assert message == {
        "id": "msg_chatcmpl-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Weather, then.", "signature": ""},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "c2", "name": "now", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 5,
            "cache_creation_input_tokens": 1,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
            "output_tokens_details": {"thinking_tokens": 3},
        },
    }
    assert "Weather" not in json.dumps(patch), "a text is there once"


@pytest.mark.parametrize(
    ("choice", "stop_reason", "stop_sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "tool_calls"}, "tool_use", None),
        ({"finish_reason": "function_call"}, "tool_use", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
        ({"finish_reason": "stop", "stop_reason": "\n\n"}, "stop_sequence", "\n\n"),
        ({"finish_reason": "stop", "stop_reason": 128009}, "end_turn", None),
        ({"finish_reason": "eos"}, "end_turn", None),
        ({"finish_reason": None}, None, None),
    ],
)
def test_why_an_answer_stopped(choice: Json, stop_reason: str | None, stop_sequence: str | None) -> None:
    """A finish reason is a stop reason; a stop string, as vLLM reports it, is a stop sequence."""
    answer = completion({"content": "x"})
    answer["choices"][0] |= choice
    message = own(answer)
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


def test_a_demanded_call_stops_for_it() -> None:
    """A call that ends with "stop", as one does that the client demanded by name, is a tool use."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert own(completion({"content": None, "tool_calls": [call]}))["stop_reason"] == "tool_use"


def test_a_refusal_is_said() -> None:
    """A refusal in place of a content is a text, and the reason to stop."""
    message = own(completion({"content": None, "refusal": "No."}))
    assert message["content"] == [{"type": "text", "text": "No."}]
    assert message["stop_reason"] == "refusal"


@pytest.mark.parametrize("arguments", ["{", "[1]", "12", '{"a": 1e999}', "nonsense"])
def test_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    """Arguments that are not the text of a JSON object are the field `__raw` of the input, and come back."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = completion({"content": None, "tool_calls": [call]}, "tool_calls")
    assert own(answer)["content"][0]["input"] == {"__raw": arguments}
    assert SURFACE.chat_answer(own(answer)) == answer


def test_an_answer_without_names_gets_that_of_its_entry() -> None:
    """A message has an identifier, and it is the same each time."""
    assert own({"choices": []})["id"] == "msg_public.0123"
    assert own({"id": "msg_7", "choices": []})["id"] == "msg_7"


@pytest.mark.parametrize("native", [5, [5], [None], [], {"content": []}, {"content": [5]}, {"x": {"y": 1}}])
def test_what_is_no_difference_of_a_message_is_an_unknown_field(native: Any) -> None:
    """A server's own field under the name of the extension changes no message, and comes back."""
    answer = completion({"content": "x"}, **{NATIVE: native})
    assert own(answer)["content"] == [{"type": "text", "text": "x"}]
    assert SURFACE.chat_answer(own(answer)) == answer


def test_signed_thoughts_come_back() -> None:
    """Signed and redacted thoughts are in the chat message under the name that other gateways use."""
    thoughts = [
        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "ZGF0YQ=="},
    ]
    message = SURFACE.chat_answer(native([*thoughts, {"type": "text", "text": "Yes."}]))["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "Hm.",
        "thinking_blocks": thoughts,
    }
    assert own(completion(message))["content"] == [*thoughts, {"type": "text", "text": "Yes."}]


def test_pieces_of_signed_thoughts_are_one_block() -> None:
    """Thinking that was streamed in pieces, the last of which has the signature, is one block."""
    pieces = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("a", "b")]
    pieces += [{"type": "thinking", "thinking": "", "signature": "c2ln"}]
    message = own(completion({"content": "x", "reasoning_content": "ab", "thinking_blocks": pieces}))
    assert message["content"][:-1] == [{"type": "thinking", "thinking": "ab", "signature": "c2ln"}]


def test_a_message_for_a_chat_client() -> None:
    """A chat client gets text and calls of a message, and the blocks that it cannot know in a field of its message."""
    content: list[Json] = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "text", "text": "So: "},
        {"type": "text", "text": "four."},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
    ]
    usage = {"input_tokens": 2, "cache_read_input_tokens": 3, "cache_creation_input_tokens": 4, "output_tokens": 5}
    answer = SURFACE.chat_answer(native(content, "tool_use", usage=usage))
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "So: four.",
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
        "anthropic": {"content": content},
    }
    assert answer["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 4},
    }


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"type": "error", "error": {"type": "api_error", "message": "x"}},
        {"type": "message", "content": "text"},
        {"type": "message", "content": [{"text": "x"}]},
        {"type": "message", "content": [], "usage": 5},
        {"type": "message", "content": [], CHAT: {"content": {"x": {"y": [1]}}}},
        {"type": "message", "content": [], CHAT: 5},
        {"type": "message", "content": [], CHAT: [5]},
    ],
)
def test_what_is_no_message_is_refused(answer: Json) -> None:
    """What is no message cannot be stored as one."""
    with pytest.raises(UnstorableAnswer):
        SURFACE.chat_answer(answer)


def test_a_deep_answer_is_refused() -> None:
    """An answer that is nested deeper than the interpreter can walk has no other form."""
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UnstorableAnswer):
        own(completion({"content": "x"}, anthropic_message={"x": [deep]}))
    with pytest.raises(UnstorableAnswer):
        SURFACE.chat_answer(native([{"type": "tool_use", "id": "", "name": "", "input": {"a": deep}}]))
