"""Answers come from chat completions' form into Ollama's and back, and nothing is lost in either direction."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ollama import ChatResponse, GenerateResponse

from cache.errors import UnstorableAnswer
from gateway.surfaces.ollama.chat import OllamaChatSurface
from gateway.surfaces.ollama.endpoint import OllamaSurface
from gateway.surfaces.ollama.generate import OllamaGenerateSurface
from gateway.surfaces.surface import ChatRequest, Json
from gateway.surfaces.timestamps import rfc3339, unix_seconds
from tests.gateway.surfaces.ollama.examples import chat_answers, exact, objects, own_answers, quick, values

CHAT, GENERATE = OllamaChatSurface(), OllamaGenerateSurface()
NOTHING = ChatRequest({})
ANSWER: Json = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_702_390_423,
    "model": "qwen3",
    "system_fingerprint": "fp",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": None,
                "reasoning": "She wants the weather.",
                "tool_calls": [
                    {
                        "id": "call_a",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Paris"}'},
                    }
                ],
            },
            "logprobs": {"content": [{"token": "x", "logprob": -0.5}], "refusal": None},
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
}


def own(answer: Json, surface: OllamaSurface = CHAT) -> Json:
    return surface.own_answer(answer, NOTHING, "public.1")


def test_an_answer_has_the_fields_that_ollama_gives_it() -> None:
    """Thinking, calls with objects, logprobs, a time, and counts; the rest is in one field more."""
    answer = own(ANSWER)
    extension = answer.pop("keepgate")
    assert answer == {
        "model": "qwen3",
        "created_at": "2023-12-12T14:13:43Z",
        "message": {
            "role": "assistant",
            "content": "",
            "thinking": "She wants the weather.",
            "tool_calls": [{"id": "call_a", "function": {"name": "weather", "arguments": {"city": "Paris"}}}],
        },
        "logprobs": [{"token": "x", "logprob": -0.5}],
        "done": True,
        "done_reason": "stop",
        "total_duration": 0,
        "load_duration": 0,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 0,
        "eval_count": 5,
        "eval_duration": 0,
    }
    assert "She wants" not in str(extension)
    assert ChatResponse.model_validate(answer).message.thinking == "She wants the weather."


@pytest.mark.parametrize(
    "change",
    [
        {"id": "chatcmpl-1", "content": "Hello", "finish_reason": "length"},
        {"usage": None},
        {"choices": []},
        {"choices": [ANSWER["choices"][0] | {"index": 0}, ANSWER["choices"][0] | {"index": 1}]},
        {"created": "yesterday"},
        {"created": True, "model": None, "1/2~": 1},
        {"choices": [{"message": {"content": ["parts"], "tool_calls": [{"function": {"name": "f"}}, 7]}}]},
    ],
    ids=str,
)
def test_an_answer_that_has_another_form_comes_back(change: Json) -> None:
    """Several choices, no usage, wrong types: an answer is not judged here."""
    answer = ANSWER | change
    for surface in (CHAT, GENERATE):
        assert surface.chat_answer(own(answer, surface)) == answer


@pytest.mark.parametrize(("surface", "is_chat"), [(CHAT, True), (GENERATE, True), (GENERATE, False)])
@quick
@given(data=st.data())
def test_a_chat_answer_comes_back(surface: OllamaSurface, is_chat: bool, data: st.DataObject) -> None:
    """What has no place in Ollama's form survives in the extension; official types take the answer."""
    answer = data.draw(chat_answers(is_chat))
    before = copy.deepcopy(answer)
    rendered = own(answer, surface)
    kept = msgspec.json.encode(rendered)
    restored = surface.chat_answer(rendered)

    kind: Any = GenerateResponse if surface is GENERATE else ChatResponse
    assert kind.model_validate(rendered).done is True
    assert exact(restored) == exact(surface.chat_answer(msgspec.json.decode(kept))) == exact(answer) == exact(before)
    assert exact(rendered) == exact(msgspec.json.decode(kept))


@pytest.mark.parametrize("surface", [CHAT, GENERATE], ids=lambda surface: surface.family)
@quick
@given(data=st.data())
def test_an_answer_of_ollama_comes_back(surface: OllamaSurface, data: st.DataObject) -> None:
    """With its durations, logprobs, context and the digits of its time, and without ids that it did not have."""
    answer = data.draw(own_answers(message=surface is CHAT))
    before = copy.deepcopy(answer)
    chat = surface.chat_answer(answer)
    kept = msgspec.json.decode(msgspec.json.encode(chat))

    assert exact(own(chat, surface)) == exact(own(kept, surface)) == exact(answer) == exact(before)
    assert exact(chat) == exact(kept)


def test_an_answer_of_ollama_is_a_chat_completion() -> None:
    """Calls get ids of their own, which differ between answers, and the counts become usage."""
    answer = {
        "model": "qwen3",
        "created_at": "2023-12-12T14:13:43.416799Z",
        "message": {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        },
        "done": True,
        "done_reason": "stop",
        "prompt_eval_count": 7,
        "eval_count": 5,
    }
    chat = CHAT.chat_answer(answer)
    other = CHAT.chat_answer(answer | {"model": "other"})
    choice = chat["choices"][0]
    call = choice["message"]["tool_calls"][0]

    assert (chat["object"], chat["created"], choice["finish_reason"]) == (
        "chat.completion",
        1_702_390_423,
        "tool_calls",
    )
    assert chat["usage"] == {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    assert call["function"] == {"name": "f", "arguments": '{"a":1}'}
    assert CHAT.chat_answer(answer | {"done_reason": "length"})["choices"][0]["finish_reason"] == "length"
    assert call["id"] != other["choices"][0]["message"]["tool_calls"][0]["id"]
    assert chat["id"] != other["id"]


def test_an_answer_of_one_endpoint_serves_the_other() -> None:
    """What /api/generate said of itself is no field of /api/chat."""
    answer = {"model": "m", "created_at": "2025-01-01T00:00:00Z", "response": "Hi", "done": True, "context": [1, 2]}
    chat = own(GENERATE.chat_answer(answer))
    assert chat["message"] == {"role": "assistant", "content": "Hi"}
    assert "context" not in chat


@pytest.mark.parametrize(
    "change",
    [
        {"done": False},
        {"done": 1},
        {"error": "no such model"},
        {"message": None},
        {"message": {"role": "assistant"}},
        {"message": {"content": ["parts"]}},
        {"message": {"content": "", "thinking": 7}},
        {"message": {"content": "", "tool_calls": "f"}},
        {"message": {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}},
        {"message": {"content": "", "tool_calls": [{"function": {"arguments": {}}}]}},
        {"logprobs": {"content": []}},
        {"done_reason": 1},
        {"keepgate": {"form": "chat.completions", "changes": {"model": {"b": [1]}}}},
        {"keepgate": {"form": "chat.completions", "changes": {"choices": {"5": [1]}}}},
        {"keepgate": {"form": "chat.completions", "changes": {"id": 5}}},
    ],
    ids=str,
)
def test_what_is_no_answer_is_not_stored(change: Json) -> None:
    """Nor is one whose extension does not fit it."""
    answer = {"model": "m", "message": {"role": "assistant", "content": "Hi"}, "done": True}
    CHAT.chat_answer(answer)
    with pytest.raises(UnstorableAnswer):
        CHAT.chat_answer(answer | change)


def test_arguments_that_are_nested_too_deep_are_not_stored() -> None:
    """Nor are they shown to a client of Ollama, who could not read them."""
    deep: Json = {}
    for _ in range(100_000):
        deep = {"a": deep}
    answer = {"model": "m", "message": {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}}
    with pytest.raises(UnstorableAnswer):
        CHAT.chat_answer(answer | {"done": True})
    for depth in (*range(800, 1000), 100_000):
        arguments = '{"a":' * depth + "1" + "}" * depth
        message = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        shown = own({"choices": [{"message": message}]})["message"]
    assert shown == {"role": "assistant", "content": ""}


@quick
@given(objects, values)
def test_any_object_is_rendered_or_refused(fields: Json, said: Any) -> None:
    """An upstream may send anything: there is no other exception."""
    for answer in (fields, {"choices": [{"message": said, "text": said}], "ollama": said}, {"choices": said}):
        for surface in (CHAT, GENERATE):
            assert surface.chat_answer(own(answer, surface)) == answer
            for strange in (answer, {"message": said, "response": said, "done": True}, {"keepgate": said, **fields}):
                try:
                    assert own(surface.chat_answer(strange), surface) == strange
                except UnstorableAnswer:
                    continue


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "1970-01-01T00:00:00Z"), (1_702_390_423.25, "2023-12-12T14:13:43.25Z"), (2**60, "1970-01-01T00:00:00Z")],
)
def test_times_are_written_as_ollama_writes_them(seconds: float, text: str) -> None:
    """In UTC, with the digits that are not zero; what is no time is the beginning of time."""
    assert rfc3339(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2023-08-04T08:52:19.385406455-07:00", 1_691_164_339),
        ("2025-01-01T00:00:00", 1_735_689_600),
        ("today", 0),
        (7, 0),
        ("0001-01-01T00:00:00+23:59", -62_135_683_140),
    ],
)
def test_times_of_ollama_are_read(text: Any, seconds: int) -> None:
    """In any zone, in UTC where none is named, rounded down."""
    assert unix_seconds(text) == seconds


@quick
@given(st.floats(0, 2**37) | st.integers(0, 2**37) | st.sampled_from([-0.0, 0.9999999999, 5e-324]))
def test_a_time_comes_back_without_its_fraction(seconds: float) -> None:
    """Whatever its fraction is."""
    assert unix_seconds(rfc3339(seconds)) == int(seconds)
    assert len(rfc3339(seconds)) <= len("2023-08-04T08:52:19.385406455Z")
