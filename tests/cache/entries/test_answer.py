"""Streams of real servers become the answers they are, and only whole answers are kept."""

import json
from typing import Any

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings

from cache.entries.answer import StreamAssembler, Usage, check_complete, stream_of, usage_of
from cache.errors import UnstorableAnswer
from tests.cache.entries.test_answer_round_trip import assembled, responses

Json = dict[str, Any]


def chunk(delta: Json, finish: str | None = None, **fields: Any) -> Json:
    """A chunk as OpenAI sends it."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "gpt-5-2026-01-01",
        "system_fingerprint": "fp_1",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
        **fields,
    }


def call(index: int, **fields: Any) -> Json:
    return {"tool_calls": [{"index": index, **fields}]}


def message_of(chunks: list[Json]) -> Json:
    message: Json = assembled(chunks)["choices"][0]["message"]
    return message


def test_openai_text_with_usage() -> None:
    """A text streamed by OpenAI, with usage on a chunk without choices, is assembled to one answer."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    chunks = [
        chunk({"role": "assistant", "content": "", "refusal": None}, usage=None, obfuscation="aX3"),
        chunk({"content": "Hel"}, usage=None, obfuscation="q"),
        chunk({"content": "lo"}, usage=None, obfuscation="Zw0"),
        chunk({}, "stop", usage=None, obfuscation=""),
        {**chunk({}), "choices": [], "usage": usage, "obfuscation": "9"},
    ]
    assert assembled(chunks) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "gpt-5-2026-01-01",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": usage,
    }


def test_openai_tool_calls_in_parallel() -> None:
    """Tool calls whose arguments come in pieces are assembled by their index, which the answer leaves out."""
    chunks = [
        chunk({"role": "assistant", "content": None}),
        chunk(call(0, id="c0", type="function", function={"name": "get_weather", "arguments": ""})),
        chunk(call(0, function={"arguments": '{"city": '})),
        chunk(call(0, function={"arguments": '"Rome"}'})),
        chunk(call(1, id="c1", type="function", function={"name": "now", "arguments": ""})),
        chunk(call(1, function={"arguments": "{}"})),
        chunk({}, "tool_calls"),
    ]
    assert message_of(chunks) == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
            {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    }


def test_repeated_fields_on_pieces_of_a_tool_call_count_once() -> None:
    """An id, type or name that is repeated on later pieces of a tool call counts once."""
    chunks = [
        chunk(call(0, id="c0", type="function", function={"name": "f", "arguments": ""}) | {"role": "assistant"}),
        chunk(call(0, id="", type="", function={"name": "", "arguments": "{"}) | {"role": ""}),
        chunk(call(0, id="c0", type="function", function={"name": "f", "arguments": '"a":'})),
        chunk(call(0, id=None, type=None, function={"name": None, "arguments": "1"}) | {"role": "assistant"}),
        chunk(
            {
                "tool_calls": [
                    {"index": 0, "function": {"arguments": "}"}},
                    {"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
                ]
            }
        ),
        chunk({}, "tool_calls"),
    ]
    assert message_of(chunks) == {
        "role": "assistant",
        "tool_calls": [
            {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
            {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }


def test_calls_without_an_index_are_whole() -> None:
    """A tool call without an index is taken as complete."""
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(2)]
    chunks = [chunk({"role": "assistant", "tool_calls": [one]}) for one in calls] + [chunk({}, "tool_calls")]
    assert message_of(chunks)["tool_calls"] == calls


def test_a_deprecated_function_call() -> None:
    """The pieces of a `function_call` are assembled to one call."""
    chunks = [
        chunk({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}),
        chunk({"function_call": {"arguments": "{"}}),
        chunk({"function_call": {"arguments": "}"}}),
        chunk({}, "function_call"),
    ]
    assert message_of(chunks)["function_call"] == {"name": "f", "arguments": "{}"}


def test_vllm_reasoning_logprobs_and_stop_reason() -> None:
    """The reasoning, logprobs and stop reason that vLLM streams are in the answer."""

    def token(text: str) -> Json:
        return {"token": text, "logprob": -0.5, "bytes": [1], "top_logprobs": [{"token": text, "logprob": 0}]}

    def piece(delta: Json, tokens: list[Json], finish: str | None = None, stop: Any = None) -> Json:
        logprobs = {"content": tokens} if tokens else None
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish, "stop_reason": stop}
        return {
            "id": "chatcmpl-9",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "q",
            "choices": [{**choice, "token_ids": None}],
        }

    chunks = [
        piece({"role": "assistant", "content": ""}, []),
        piece({"reasoning_content": "Let me "}, [token("Let"), token(" me")]),
        piece({"reasoning_content": "see."}, [token(" see.")]),
        piece({"content": "4"}, [token("4")]),
        piece({"content": ""}, [], "stop", "</answer>"),
        {**piece({}, []), "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}},
    ]
    response = assembled(chunks)
    assert response["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "4", "reasoning_content": "Let me see."},
            "logprobs": {"content": [token(text) for text in ("Let", " me", " see.", "4")]},
            "finish_reason": "stop",
            "stop_reason": "</answer>",
            "token_ids": None,
        }
    ]
    assert usage_of(response) == Usage(1, 4)


def test_of_usage_on_every_chunk_the_last_one_counts() -> None:
    """The usage of the last chunk counts where every chunk has one."""
    chunks = [
        chunk({"role": "assistant", "content": ""}, usage={"prompt_tokens": 3, "completion_tokens": 0}),
        chunk({"content": "a"}, usage={"prompt_tokens": 3, "completion_tokens": 1}),
        chunk({}, "stop", usage={"prompt_tokens": 3, "completion_tokens": 2}),
    ]
    assert usage_of(assembled(chunks)) == Usage(3, 2)


def test_llama_cpp_timings_at_the_end() -> None:
    """A field that only the last chunk has, or that grows from chunk to chunk, ends with its last value."""
    chunks = [
        chunk({"role": "assistant", "content": None}, timings={"predicted_n": 0}, system_fingerprint="b1"),
        chunk({"content": "Hi"}, timings={"predicted_n": 1}, system_fingerprint="b1"),
        chunk({}, "stop", timings={"predicted_n": 2, "predicted_ms": 20.5}, system_fingerprint="b1"),
    ]
    response = assembled(chunks)
    assert response["timings"] == {"predicted_n": 2, "predicted_ms": 20.5}
    assert response["choices"][0]["message"]["content"] == "Hi"


def test_a_field_that_is_null_at_first_takes_its_later_value() -> None:
    """A field that is null in an early chunk takes its value from a later one."""
    chunks = [
        chunk({"role": "assistant", "content": "a"}, system_fingerprint=None, service_tier=None),
        chunk({}, "stop", system_fingerprint="fp_2", service_tier="default"),
    ]
    response = assembled(chunks)
    assert (response["system_fingerprint"], response["service_tier"]) == ("fp_2", "default")


def test_a_first_chunk_of_azure_without_id_and_model() -> None:
    """The empty id and model of Azure's first chunk are not used, and its filter results are kept."""
    results = [{"prompt_index": 0, "content_filter_results": {"hate": {"filtered": False}}}]
    first = {"choices": [], "created": 0, "id": "", "model": "", "object": "", "prompt_filter_results": results}
    response = assembled([first, chunk({"role": "assistant", "content": "a"}), chunk({}, "stop")])
    assert response["prompt_filter_results"] == results
    assert response["id"] == "chatcmpl-1"
    assert response["object"] == "chat.completion"
    assert response["model"] == "gpt-5-2026-01-01"
    assert response["created"] == 1700000000


def test_choices_come_in_any_order() -> None:
    """Choices whose pieces come in any order each have their own text and finish reason."""
    chunks = [
        {**chunk({}), "choices": [{"index": 1, "delta": {"role": "assistant", "content": "b"}, "finish_reason": None}]},
        {
            **chunk({}),
            "choices": [
                {"index": 0, "delta": {"role": "assistant", "content": "a"}, "finish_reason": None},
                {"index": 1, "delta": {"content": "b"}, "finish_reason": "length"},
            ],
        },
        {**chunk({}), "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]},
    ]
    choices = assembled(chunks)["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "aa", "stop"),
        (1, "bb", "length"),
    ]


def test_text_completions_with_logprobs() -> None:
    """The logprobs of a text completion are concatenated, with null entries and zeroes."""

    def piece(text: str, logprobs: Json | None, finish: str | None = None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}

    def logprobs(token: str, offset: int, logprob: float | None, top: Json | None) -> Json:
        return {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [offset]}

    chunks = [
        piece("a", logprobs("a", 0, None, None)),
        piece("index", logprobs("index", 1, 0, {"index": 0})),
        piece("index", logprobs("index", 6, 0, {"index": 0, "b": -1.5})),
        piece("", None, "length"),
    ]
    assert assembled(chunks) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "aindexindex",
                "logprobs": {
                    "tokens": ["a", "index", "index"],
                    "token_logprobs": [None, 0, 0],
                    "top_logprobs": [None, {"index": 0}, {"index": 0, "b": -1.5}],
                    "text_offset": [0, 1, 6],
                },
                "finish_reason": "length",
            }
        ],
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"error": {"message": "out of memory", "type": "server_error"}},
        {"choices": [], "error": "overloaded"},
        {},
        {"choices": None},
        {"choices": {"index": 0}},
        {"choices": ["text"]},
        {"choices": [{"index": "0", "delta": {"content": "a"}}]},
        {"choices": [{"index": None, "delta": {"content": "a"}}]},
        {"choices": [{"index": [0], "delta": {"content": "a"}}]},
    ],
)
def test_a_stream_with_an_error_in_it_is_no_answer(bad: Json) -> None:
    """A chunk with an error or malformed choices raises UnstorableAnswer."""
    assembler = StreamAssembler()
    assembler.add(chunk({"role": "assistant", "content": "a"}))
    with pytest.raises(UnstorableAnswer):
        assembler.add(bad)


def test_a_null_error_field_is_no_error() -> None:
    """An answer whose error field is null is complete."""
    response = assembled([chunk({"role": "assistant", "content": "a"}, error=None), chunk({}, "stop", error=None)])
    check_complete(response)


def whole(**choice: Any) -> Json:
    message = {"role": "assistant", "content": "a"}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}


@pytest.mark.parametrize(
    "response",
    [
        whole(),
        whole(finish_reason="length"),
        whole(finish_reason="tool_calls", message={"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}),
        whole(message={"role": "assistant", "content": None, "refusal": "No."}),
        whole(message={"role": "assistant", "content": "", "reasoning_content": "hm"}, finish_reason="length"),
        whole(message={"role": "assistant", "content": None, "audio": {"data": "x"}}),
        {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]},
        {**whole(message={"role": "assistant", "content": ""}), "usage": {"completion_tokens": 1}},
        {**whole(), "error": None},
    ],
)
def test_complete_answers_are_kept(response: Json) -> None:
    """Every kind of answer that has content and a finish reason of its own is complete."""
    check_complete(response)


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ({"error": {"message": "no"}}, "error"),
        ({**whole(), "error": {"message": "no"}}, "error"),
        ({}, "no choices"),
        ({"choices": []}, "no choices"),
        ({"choices": None}, "no choices"),
        ({"choices": "a"}, "no choices"),
        ({"choices": ["a"]}, "no finish reason"),
        (whole(finish_reason=None), "no finish reason"),
        (whole(finish_reason=""), "no finish reason"),
        (whole(finish_reason=["stop"]), "no finish reason"),
        (whole(finish_reason="error"), "'error'"),
        (whole(finish_reason="abort"), "'abort'"),
        (whole(finish_reason="cancelled"), "'cancelled'"),
        ({"choices": [*whole()["choices"], {"index": 1, "message": {"content": "b"}}]}, "no finish reason"),
        (whole(message={"role": "assistant", "content": ""}), "empty"),
        (whole(message={"role": "assistant", "content": None}), "empty"),
        (whole(message=None), "nothing that can be sent"),
        ({"choices": [{"index": 0, "finish_reason": "stop"}]}, "empty"),
        ({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}, "empty"),
        ({**whole(message={"content": ""}), "usage": {"completion_tokens": 0}}, "empty"),
    ],
)
def test_incomplete_answers_are_not_kept(response: Json, reason: str) -> None:
    """An error, a cut answer and an empty answer raise UnstorableAnswer with the reason."""
    with pytest.raises(UnstorableAnswer, match=reason):
        check_complete(response)


def test_a_cut_stream_is_not_complete() -> None:
    """A stream that ends before its finish reason raises UnstorableAnswer."""
    chunks = [chunk({"role": "assistant", "content": ""}), chunk({"content": "Hel"}), chunk({"content": "lo"})]
    for length in range(1, 4):
        with pytest.raises(UnstorableAnswer, match="no finish reason"):
            check_complete(assembled(chunks[:length]))
    check_complete(assembled([*chunks, chunk({}, "stop")]))


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, Usage(3, 4)),
        ({"prompt_tokens": 3}, Usage(3, 0)),
        ({"prompt_tokens": None, "completion_tokens": "4"}, Usage(0, 0)),
        (None, None),
        ([], None),
    ],
)
def test_usage_is_what_the_answer_reports(usage: Any, expected: Usage | None) -> None:
    """The usage is what the answer reports, and None where it reports none."""
    assert usage_of({"usage": usage}) == expected
    assert usage_of({}) is None


async def read_with_openai(body: bytes, family: str, size: int) -> list[Json]:
    """The chunks that the real client finds in an event stream that arrives in writes of `size` bytes."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for start in range(0, len(body), size):
            await response.write(body[start : start + size])
        return response

    application = web.Application()
    application.router.add_post("/v1/{endpoint:.*}", answer)
    async with (
        TestServer(application) as server,
        openai.AsyncOpenAI(api_key="k", base_url=str(server.make_url("/v1")), max_retries=0) as client,
    ):
        stream: Any
        if family == "chat":
            stream = await client.chat.completions.create(model="m", messages=[], stream=True)
        else:
            stream = await client.completions.create(model="m", prompt="p", stream=True)
        return [found.model_dump(exclude_unset=True) async for found in stream]


@given(responses())
@settings(max_examples=25, deadline=None)
async def test_the_openai_client_reads_a_replay(response: Json) -> None:
    """The openai client reads from a replayed stream the answer that it was made from."""
    family = "chat" if response["object"] == "chat.completion" else "text"
    body = stream_of(response, include_usage=True)
    found = await read_with_openai(body, family, 1000)
    sent = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line and line != "data: [DONE]"]
    assert [one["choices"] for one in found] == [one["choices"] for one in sent]
    assert assembled(found) == response


async def test_the_openai_client_reads_a_replay_byte_by_byte() -> None:
    """Line ends inside the text do not break an event for the openai client."""
    message = {"role": "assistant", "content": 'a\n\nb\r\n\r\ndata: [DONE]\n\nc\u2028\u2029\x85é😀"\\'}
    response = {
        "id": "1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }
    found = await read_with_openai(stream_of(response, include_usage=False), "chat", 1)
    assert assembled(found) == response
