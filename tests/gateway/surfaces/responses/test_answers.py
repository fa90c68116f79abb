"""Answers of the Responses API: chat completions as Response objects and back, with nothing lost either way."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response

from cache.errors import UnstorableAnswer
from tests.gateway.surfaces.responses.examples import SURFACE, asked, chats, copied, natives, tidy_chats, values

Json = dict[str, Any]


def chat(message: Json, finish_reason: str = "stop", **fields: Any) -> Json:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion", "created": 7, "model": "m", "choices": [choice], **fields}


@given(chats())
@settings(max_examples=100, deadline=None)
def test_a_chat_completion_comes_back_from_its_response(answer: Json) -> None:
    """A chat completion with any further fields and choices is the same after it was a Response."""
    before = copied(answer)
    own = SURFACE.own_answer(answer, asked(), "entry")
    assert SURFACE.chat_answer(copied(own)) == before
    assert answer == before, "the answer was changed"


@given(natives())
@settings(max_examples=100, deadline=None)
def test_a_response_comes_back_from_its_chat_completion(response: Json) -> None:
    """A Response with items and fields of all kinds is the same after it was a chat completion, for any request."""
    before = copied(response)
    answer = SURFACE.chat_answer(response)
    assert SURFACE.own_answer(copied(answer), asked(instructions="other", temperature=1), "other") == before
    assert response == before, "the response was changed"


@given(tidy_chats())
@settings(max_examples=100, deadline=None)
def test_an_answer_is_a_valid_response(answer: Json) -> None:
    """A Response has the types of OpenAI's SDK and no fields but its own, `store` and the documented one."""
    tool = {"type": "function", "name": "f"}
    own = SURFACE.own_answer(answer, asked(tools=[tool], text={"verbosity": "low"}, reasoning={"effort": "low"}), "e")
    parsed = Response.model_validate(own)
    assert set(parsed.model_extra or {}) == {"store", "chat_completion"}
    message = answer["choices"][0]["message"]
    assert parsed.output_text == (message["content"] or "")
    for output in parsed.output:
        assert not output.model_extra, output


def test_each_part_of_an_answer_has_its_place() -> None:
    """Reasoning, text, annotations, logprobs, refusal, calls and usage are where clients of the API look for them."""
    citation = {"start_index": 0, "end_index": 2, "title": "t", "url": "u"}
    token = {"token": "hé", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    answer = chat(
        {
            "content": "hé",
            "refusal": "no",
            "reasoning_content": "because",
            "annotations": [{"type": "url_citation", "url_citation": citation}],
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "b", "type": "custom", "custom": {"name": "g", "input": "x"}},
            ],
        },
        usage={
            "prompt_tokens": 9,
            "completion_tokens": 5,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 3},
        },
        service_tier="flex",
    )
    answer["choices"][0]["logprobs"] = {"content": [token], "refusal": None}
    own = Response.model_validate(SURFACE.own_answer(answer, asked(), "e")).to_dict()
    output: Any = own["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "because"}]
    assert output[1]["content"] == [
        {
            "type": "output_text",
            "text": "hé",
            "annotations": [{"type": "url_citation", **citation}],
            "logprobs": [{**token, "bytes": [104, 195, 169]}],
        },
        {"type": "refusal", "refusal": "no"},
    ]
    assert (output[2]["call_id"], output[2]["name"], output[2]["arguments"]) == ("a", "f", "{}")
    assert (output[3]["call_id"], output[3]["name"], output[3]["input"]) == ("b", "g", "x")
    assert own["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 14,
    }
    assert (own["created_at"], own["status"], own["model"], own["service_tier"]) == (7, "completed", "m", "flex")


@pytest.mark.parametrize(
    ("finish_reason", "status", "reason"),
    [
        ("stop", "completed", None),
        ("tool_calls", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
def test_the_finish_reason_is_the_status(finish_reason: str, status: str, reason: str | None) -> None:
    """A truncated or filtered answer is incomplete, as is its last item, and says why; any other is completed."""
    own = SURFACE.own_answer(chat({"content": "x"}, finish_reason), asked(), "e")
    assert own["status"] == own["output"][-1]["status"] == status
    assert own["incomplete_details"] == (reason and {"reason": reason})


def test_a_native_response_reads_as_a_chat_completion() -> None:
    """A client of chat completions gets the text, the reasoning, the calls and the usage of a native Response."""
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 5.0,
        "model": "m",
        "status": "completed",
        "output": [
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "brief"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hi", "annotations": []}],
            },
            {"type": "function_call", "id": "fc_1", "call_id": "a", "name": "f", "arguments": "{}"},
        ],
        "usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7},
    }
    answer = SURFACE.chat_answer(response)
    del answer["response"]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "hi", "reasoning_content": "brief", "tool_calls": [call]}
    assert answer == {
        "id": "resp_1",
        "object": "chat.completion",
        "created": 5,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
    }


def test_calls_without_an_id_of_their_own_get_one() -> None:
    """Calls without ids, or with the same, can be told apart."""
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = chat({"content": None, "tool_calls": [call, call, {**call, "id": "a"}, {**call, "id": "a"}]})
    own = SURFACE.own_answer(answer, asked(), "e")
    assert len({item["call_id"] for item in own["output"]}) == 4
    assert SURFACE.chat_answer(own) == answer


def test_ids_follow_from_the_entry_the_answer_and_what_is_repeated() -> None:
    """The id of a Response is the same in every process, and another one for another entry, answer or request."""
    answer = chat({"content": "x", "reasoning_content": "y"})
    own = SURFACE.own_answer(answer, asked(), "e")
    others = [
        SURFACE.own_answer(answer, asked(), "f"),
        SURFACE.own_answer({**answer, "id": "d"}, asked(), "e"),
        SURFACE.own_answer({**answer, "created": 8}, asked(), "e"),
        SURFACE.own_answer(answer, asked(instructions="be brief"), "e"),
        SURFACE.own_answer(answer, asked(metadata={"a": "b"}), "e"),
    ]
    assert len({own["id"], *(other["id"] for other in others)}) == 6
    program = (
        "import json, sys; from tests.gateway.surfaces.responses.examples import SURFACE, asked;"
        "print(SURFACE.own_answer(json.loads(sys.argv[1]), asked(), 'e')['id'])"
    )
    run = subprocess.run([sys.executable, "-c", program, json.dumps(answer)], capture_output=True, check=True)
    assert run.stdout.decode().strip() == own["id"]


def test_ids_of_items_do_not_depend_on_what_is_repeated() -> None:
    """Two clients with one answer get the same items, so that what they ask next is one request."""
    answer = chat({"content": "x", "reasoning_content": "y"})
    one, other = (SURFACE.own_answer(answer, asked(metadata={"a": name}), "e") for name in "bc")
    assert one["output"] == other["output"]


@pytest.mark.parametrize(
    "change",
    [
        {"object": "chat.completion"},
        {"id": None},
        {"output": "text"},
        {"output": ["text"]},
        {"output": [{"type": ["message"]}]},
        {"error": {"code": "server_error", "message": "x"}},
        {"status": "failed"},
        {"status": "in_progress"},
        {"chat_completion": {"choices": {"7": [1]}}},
    ],
)
def test_what_is_no_ended_response_cannot_be_stored(change: Json) -> None:
    """What is not a Response, has failed or has not ended raises UnstorableAnswer."""
    own = SURFACE.own_answer(chat({"content": "x"}), asked(), "e")
    with pytest.raises(UnstorableAnswer):
        SURFACE.chat_answer({**own, **change})


names = st.sampled_from(
    [
        *("id", "type", "role", "content", "output", "status", "text", "refusal", "choices", "message", "usage"),
        *("tool_calls", "function", "custom", "arguments", "logprobs", "annotations", "reasoning_content", "summary"),
        *("output_text", "response", "chat_completion", "index", "delta", "0", "created", "finish_reason"),
    ]
)
wild: st.SearchStrategy[Any] = st.recursive(
    values | names, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=20
)


@given(wild, wild, wild, wild)
@settings(max_examples=200, deadline=None)
def test_any_json_from_a_chat_server_is_rendered(message: Any, logprobs: Any, usage: Any, beyond: Any) -> None:
    """Any JSON in a chat completion gives a Response object, and comes back from it."""
    for answer in (
        chat({}) | {"choices": [{"message": message, "logprobs": logprobs}], "usage": usage, "response": beyond},
        {"choices": message, "id": usage, "created": logprobs},
    ):
        own = SURFACE.own_answer(answer, asked(), "e")
        assert isinstance(own["id"], str)
        if "chat_completion" in own:
            assert SURFACE.chat_answer(own) == answer


@given(
    st.lists(
        st.fixed_dictionaries({"type": names | st.sampled_from(["function_call"])}, optional={"content": wild}) | wild
    ),
    wild,
)
@settings(max_examples=200, deadline=None)
def test_any_json_from_a_native_server_is_read_or_refused(output: Any, beyond: Any) -> None:
    """Any JSON in a Response comes back from a chat completion as it was, or raises UnstorableAnswer."""
    for extra in ({}, {"chat_completion": beyond}, {"usage": beyond, "incomplete_details": beyond}):
        response = {"id": "resp_1", "object": "response", "output": output, **extra}
        try:
            answer = SURFACE.chat_answer(response)
        except UnstorableAnswer:
            continue
        SURFACE.own_stream(response, asked())
        if "response" in answer and not isinstance(extra.get("chat_completion"), dict):
            assert SURFACE.own_answer(answer, asked(), "e") == response
