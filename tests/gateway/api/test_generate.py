"""Keepgate's own API: POST /v1/generate and POST /v1/generate/batch."""

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import Answer, Client
from tests.gateway.conftest import Stage


async def generate(client: Client, path: str = "/v1/generate", **fields: Any) -> Answer:
    return await client.send("POST", path, msgspec.json.encode({"model": "mock", **fields}))


async def test_a_prompt_becomes_a_text(stage: Stage) -> None:
    """A prompt is one user message; the answer has its text, why it ended, and its tokens."""
    mock = await stage.mock(Reply(text="Paris"))
    answer = await generate(await stage.gateway(mock), prompt="The capital of France?", system="Be brief.", top_k=3)

    assert answer.json == {
        "id": "chatcmpl-mock-1",
        "object": "generation",
        "created": 1_700_000_000,
        "model": "mock",
        "text": "Paris",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
    }
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "The capital of France?"}
    assert mock.received[0].fields == {"model": "mock", "messages": [system, user], "top_k": 3}


async def test_a_raw_prompt_is_a_completion(stage: Stage) -> None:
    """With `raw` the prompt goes to the model as it is."""
    mock = await stage.mock(Reply(text="Paris"))
    answer = await generate(await stage.gateway(mock), prompt="The capital of France is", raw=True)

    assert answer.json["text"] == "Paris"
    assert (mock.received[0].path, mock.received[0].fields["prompt"]) == ("/v1/completions", "The capital of France is")


async def test_the_same_prompt_as_a_chat_is_one_entry(stage: Stage) -> None:
    """What was generated answers the same chat, and the other way round."""
    client = await stage.gateway(await stage.mock())
    await generate(client, prompt="hello")
    chat = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}
    assert (await client.post(chat)).cache == "hit"


async def test_a_stream_gives_the_text_in_pieces(stage: Stage) -> None:
    """A stream has events with text, one with the rest of the answer, and [DONE]; a hit the same text."""
    client = await stage.gateway(await stage.mock(Reply(text="one two three " * 10)))
    for cache in ("miss", "hit"):
        answer = await generate(client, prompt="count", stream=True)
        lines = [line.removeprefix("data: ") for line in answer.body.decode().split("\n\n") if line]
        events = [msgspec.json.decode(line) for line in lines[:-1]]
        assert (answer.cache, lines[-1]) == (cache, "[DONE]")
        assert "".join(event["text"] for event in events) == "one two three " * 10
        assert (events[-1]["finish_reason"], events[-1]["usage"]["completion_tokens"]) == ("stop", 30)


@pytest.mark.parametrize(("optimization", "caches"), [("none", ["bypass"] * 2), ("basic", ["miss", "hit"])])
async def test_without_optimization_each_answer_is_computed(stage: Stage, optimization: str, caches: list[str]) -> None:
    """`optimization: none` uses no cache, `basic` the exact one."""
    client = await stage.gateway(await stage.mock())
    answers = [await generate(client, prompt="hello", optimization=optimization) for _ in range(2)]
    assert [answer.cache for answer in answers] == caches


@pytest.mark.parametrize(("optimization", "model"), [("none", "mock"), ("basic", "mock"), ("full", "mock-int4")])
async def test_a_quantised_variant_is_used_under_full(stage: Stage, optimization: str, model: str) -> None:
    """The variant that the operator names answers requests with `optimization: full` alone."""
    mock = await stage.mock(models=("mock", "mock-int4"))
    client = await stage.gateway(mock, quantized_variants=("mock=mock-int4",))
    assert (await generate(client, prompt="hello", optimization=optimization)).json["model"] == model


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "messages": []}, "messages"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "system": 1}, "system"),
        ({"prompt": "a", "raw": "yes"}, "raw"),
        ({"prompt": "a", "stream": 1}, "stream"),
        ({"prompt": "a", "optimization": "much"}, "optimization"),
        ({"prompt": "a", "optimization": []}, "optimization"),
    ],
)
async def test_an_invalid_field_is_named(stage: Stage, fields: dict[str, Any], param: str) -> None:
    """A field of a wrong type or value gives 400 and its name."""
    answer = await generate(await stage.gateway(await stage.mock()), **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_a_batch_has_a_result_for_each_prompt(stage: Stage) -> None:
    """Results come in the order of the prompts; the totals count hits, tokens and failures."""
    mock = await stage.mock(
        Reply(when="bad", status=400, error={"message": "no", "type": "invalid_request_error"}), Reply(text="fine")
    )
    client = await stage.gateway(mock)
    await generate(client, prompt="a")
    answer = await generate(client, "/v1/generate/batch", prompts=["a", "bad", "b", "b"])
    results, totals = answer.json["results"], answer.json["totals"]

    assert [result["index"] for result in results] == [0, 1, 2, 3]
    assert [result["status"] for result in results] == [200, 400, 200, 200]
    assert results[1]["error"]["message"] == "no"
    assert results[0]["cache"] == {"outcome": "hit", "layer": "exact"}
    assert [results[n]["generation"]["text"] for n in (0, 2, 3)] == ["fine"] * 3
    assert len(mock.received) == 3  # "a", "bad", and "b" once
    assert (totals["items"], totals["succeeded"], totals["failed"], totals["completion_tokens"]) == (4, 3, 1, 3)
    assert (totals["cache_hits"] + totals["shared"], totals["computed_tokens"]) == (2, 1)
    assert totals["tokens_per_second"] > 0


async def test_requests_of_a_batch_have_fields_of_their_own(stage: Stage) -> None:
    """The fields of the batch are for all requests, and a request's own come before them."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    requests = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2}]
    answer = await generate(client, "/v1/generate/batch", requests=requests, max_tokens=9, temperature=0)

    assert answer.json["totals"]["succeeded"] == 2
    assert sorted(received.fields["max_tokens"] for received in mock.received) == [2, 9]


async def test_a_batch_without_optimization_runs_one_request_at_a_time(stage: Stage) -> None:
    """With `none` the second request is sent after the first was answered; else they are sent together."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    for optimization, at_once in (("none", 1), ("basic", 3)):
        before = len(mock.received)
        prompts = [f"{optimization} {n}" for n in range(3)]
        asking = asyncio.create_task(generate(client, "/v1/generate/batch", prompts=prompts, optimization=optimization))
        await mock.wait_for(before + at_once)
        assert len(mock.received) == before + at_once
        mock.hold.set()
        assert (await asking).json["totals"]["succeeded"] == 3
        mock.hold.clear()
    mock.hold.set()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompts"),
        ({"prompts": ["a"], "requests": [{"prompt": "a"}]}, "prompts"),
        ({"prompts": []}, "prompts"),
        ({"prompts": "a"}, "prompts"),
        ({"prompts": ["a"] * 5000}, "prompts"),
        ({"prompts": ["a", 1]}, "prompts[1]"),
        ({"requests": [{"prompt": "a"}, "b"]}, "requests[1]"),
        ({"requests": [{"prompt": "a", "optimization": "none"}]}, "requests[0]"),
        ({"prompts": ["a"], "stream": True}, "stream"),
        ({"prompts": ["a"], "optimization": "x"}, "optimization"),
    ],
)
async def test_an_invalid_batch_is_refused_whole(stage: Stage, fields: dict[str, Any], param: str) -> None:
    """A batch with an invalid field gives 400 with its name, and nothing is sent."""
    mock = await stage.mock()
    answer = await generate(await stage.gateway(mock), "/v1/generate/batch", **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert mock.received == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choices", [[None], [{"message": "x"}], [{"delta": 7}], [{"index": "0", "delta": {}}], []])
async def test_an_odd_answer_is_an_error_or_an_empty_text(stage: Stage, choices: list[Any], stream: bool) -> None:
    """What is no answer never fails the gateway itself."""
    mock = await stage.mock(
        Reply(events=[{"choices": choices}, "[DONE]"]) if stream else Reply(body={"choices": choices})
    )
    answer = await generate(await stage.gateway(mock), prompt="hello", stream=stream)
    assert answer.status in (200, 502)
    assert b"internal_error" not in answer.body
