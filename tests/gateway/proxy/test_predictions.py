"""Stored answers that are sent along as predictions of new ones: which, to whom, and what clients see of them."""

import json
import logging
from typing import Any

import pytest

from gateway.proxy.predictions.usage import PredictionTokens, without_prediction_tokens
from gateway.settings.operations import LogSettings
from gateway.settings.upstreams import RetrySettings, UpstreamSettings
from gateway.upstreams.mock import MockUpstream, Received, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import COMPLETIONS, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.proxy.aging import grow_old

ANSWER = "Paris is the capital of France."
DAY = 86_400.0
NEW = {"Cache_Control": "no-cache"}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3},
}
UNPREDICTED = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


async def predicting(stage: Stage, *upstreams: MockUpstream, **settings: Any) -> Client:
    """A gateway whose upstreams take predictions."""
    return await stage.gateway(*(UpstreamSettings(url=each.url, predictions=True) for each in upstreams), **settings)


def prediction(received: Received) -> Any:
    """The text that a request predicts; None for none."""
    given = received.fields.get("prediction")
    assert given is None or given["type"] == "content"
    return None if given is None else given["content"]


def billed(text: str = ANSWER) -> Reply:
    """A reply that tells what became of a prediction."""
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return Reply(body={"id": "c1", "object": "chat.completion", "choices": choices, "usage": USAGE})


async def test_an_older_answer_to_the_same_request_is_the_prediction_of_a_new_one(stage: Stage) -> None:
    """Once it is stale, and where the client wants a new one; all bytes of the client's body stay."""
    mock = await stage.mock(Reply(text=ANSWER))
    client = await predicting(stage, mock)
    body = json.dumps(chat("Capital of France?"), indent=1).encode()
    first = await client.post(body)
    again = await client.post(body, **NEW)
    await grow_old(client, first.entry, DAY + 50)
    stale = await client.post(body)

    assert [again.cache, stale.cache] == ["bypass", "miss"]
    assert [prediction(each) for each in mock.received] == [None, ANSWER, ANSWER]
    assert mock.received[0].body == body
    assert mock.received[1].body.endswith(body[1:])


async def test_a_revalidation_predicts_the_answer_that_was_served(stage: Stage) -> None:
    """In the background as well."""
    mock = await stage.mock(Reply(text=ANSWER))
    client = await predicting(stage, mock, cache={"stale_while_revalidate": 100.0})
    first = await client.post(chat())
    await grow_old(client, first.entry, DAY + 50)
    assert (await client.post(chat())).cache == "hit"
    await mock.wait_for(2)
    assert prediction(mock.received[1]) == ANSWER


async def test_a_regenerated_answer_is_predicted(stage: Stage) -> None:
    """The answer that the user does not want again shares words with the next."""
    mock = await stage.mock(Reply(text=ANSWER))
    client = await predicting(stage, mock, cache={"regenerate": 600.0})
    await client.post(chat(temperature=1))
    assert (await client.post(chat(temperature=1))).cache == "bypass"
    assert prediction(mock.received[1]) == ANSWER


async def test_an_answer_of_another_worker_is_found_in_redis(stage: Stage, valkey: Valkey) -> None:
    """One lookup in the shared store brings it."""
    mock = await stage.mock(Reply(text=ANSWER))
    one, other = [await predicting(stage, mock, redis=valkey.url) for _ in range(2)]
    await one.post(chat())
    store = one.gateway.cache.redis
    assert store is not None
    await store.flush()
    await other.post(chat(), **NEW)
    assert prediction(mock.received[1]) == ANSWER


async def test_only_upstreams_that_take_predictions_get_them(stage: Stage) -> None:
    """By default none does; with the setting of the cache off none at all."""
    mock = await stage.mock(Reply(text=ANSWER))
    for client in (await stage.gateway(mock), await predicting(stage, mock, cache={"predictions": False})):
        await client.post(chat())
        await client.post(chat(), **NEW)
    assert [prediction(each) for each in mock.received] == [None] * 4


async def test_an_upstream_that_does_not_take_it_is_asked_without_after_one_that_does(stage: Stage) -> None:
    """A retry elsewhere sends what that upstream takes."""
    failing, plain = await stage.mock(Reply(text=ANSWER)), await stage.mock(Reply(text="plain"))
    servers = UpstreamSettings(url=failing.url, predictions=True), UpstreamSettings(url=plain.url)
    client = await stage.gateway(*servers, retries=RetrySettings(attempts=1))
    await client.post(chat())
    failing.replies[:] = [Reply(status=503, error={"message": "down"})]
    tried = len(failing.received)
    while len(failing.received) == tried:  # of two idle ones either may be the first
        assert (await client.post(chat(), **NEW)).text == "plain"
    assert prediction(failing.received[-1])
    assert not any(prediction(each) for each in plain.received)


@pytest.mark.parametrize(
    "fields",
    [
        {"prediction": {"type": "content", "content": "mine"}},
        {"prediction": None},
        {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"function_call": {"name": "f"}},
        {"modalities": ["text", "audio"]},
    ],
    ids=str,
)
async def test_a_request_that_predicts_itself_or_wants_no_text_stays(stage: Stage, fields: dict[str, Any]) -> None:
    """Its body reaches the upstream as it is."""
    mock = await stage.mock(Reply(text=ANSWER))
    client = await predicting(stage, mock)
    await client.post(chat(**fields))
    await client.post(chat(**fields), **NEW)
    assert mock.received[1].body == mock.received[0].body


@pytest.mark.parametrize(
    "message",
    [
        {
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"content": " "},
    ],
    ids=["a tool call", "nothing"],
)
async def test_an_answer_that_is_no_text_predicts_nothing(stage: Stage, message: dict[str, Any]) -> None:
    mock = await stage.mock(Reply(message=message))
    client = await predicting(stage, mock)
    await client.post(chat())
    await client.post(chat(), **NEW)
    assert [prediction(each) for each in mock.received] == [None, None]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_a_prediction_is_no_longer_than_the_answer_may_be(stage: Stage, limit: str) -> None:
    """By the request's limit of tokens, else 64 KiB; a character is not cut in two."""
    mock = await stage.mock(Reply(text="ö" * 40_000))
    client = await predicting(stage, mock)
    for fields in ({}, {limit: 3}):
        await client.post(chat(**fields))
        await client.post(chat(**fields), **NEW)
    assert [prediction(each) for each in mock.received] == [None, "ö" * 2**15, None, "ö" * 12]


async def test_completions_have_no_prediction(stage: Stage) -> None:
    """The field is one of chat completions."""
    mock = await stage.mock(Reply(text=ANSWER))
    client = await predicting(stage, mock)
    for headers in ({}, NEW):
        await client.post({"model": "mock", "prompt": "hello"}, COMPLETIONS, **headers)
    assert "prediction" not in mock.received[1].fields


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"model": "mock", "max_tokens": 99, "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"model": "mock", "input": "hello"}),
        ("/api/chat", {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "stream": False}),
    ],
)
async def test_requests_of_every_form_are_predicted(stage: Stage, path: str, body: dict[str, Any]) -> None:
    """Where they are translated for the upstream."""
    mock = await stage.mock(Reply(text=ANSWER))
    client = await predicting(stage, mock)
    await client.post(body, path)
    assert (await client.post(body, path, **NEW)).status == 200
    assert [prediction(each) for each in mock.received[-2:]] == [None, ANSWER]


async def test_an_upstream_that_refuses_the_field_is_asked_without(stage: Stage) -> None:
    """Once; later requests go without at once."""
    mock = await stage.mock(Reply(text=ANSWER, refuses=("prediction",)))
    client = await predicting(stage, mock)
    await client.post(chat())
    for _ in range(2):
        assert (await client.post(chat(), **NEW)).text == ANSWER
    assert [prediction(each) for each in mock.received] == [None, ANSWER, None, None]


@pytest.mark.parametrize("refused", ["stream_options", "prediction"])
async def test_a_stream_keeps_what_is_not_refused(stage: Stage, refused: str) -> None:
    """Usage and prediction are refused apart."""
    mock = await stage.mock(Reply(text=ANSWER, refuses=(refused,)))
    client = await predicting(stage, mock)
    await client.post(chat())
    assert (await client.post(chat(stream=True), **NEW)).text == ANSWER
    kept = {"stream_options", "prediction"} & mock.received[-1].fields.keys()
    assert kept == {"stream_options", "prediction"} - {refused}


async def test_what_became_of_a_prediction_is_counted_and_not_shown(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """The client's usage has no prediction, whole, streamed and from the cache; the record and the metrics have it."""
    caplog.set_level(logging.INFO, "keepgate.requests")
    mock = await stage.mock(billed())
    client = await predicting(stage, mock, log=LogSettings(requests="all"))
    asked, streamed = chat(), chat(stream=True, stream_options={"include_usage": True})
    first = await client.post(asked)
    accepted = await client.figure("prediction_tokens_total", source="stale", outcome="accepted")
    answers = await client.figure("predictions_total", source="stale")
    saved = await client.figure("tokens_saved_total", kind="completion")
    whole, stream = await client.post(asked, **NEW), await client.post(streamed, **NEW)
    hit = await client.post(asked)

    # The first one was not predicted by the gateway: the usage is as the upstream says.
    assert first.json["usage"] == USAGE
    unpredicted = {**USAGE, "completion_tokens_details": UNPREDICTED}
    assert [whole.json["usage"], stream.chunks[-1]["usage"], hit.json["usage"]] == [unpredicted] * 3
    assert hit.cache == "hit"
    assert await client.figure("prediction_tokens_total", source="stale", outcome="accepted") == accepted + 12
    assert await client.figure("predictions_total", source="stale") == answers + 2
    assert await client.figure("tokens_saved_total", kind="completion") == saved + 7

    told = {"prediction": "stale", "accepted_prediction_tokens": 6, "rejected_prediction_tokens": 3}
    latest = (await client.get("/v1/requests")).json["data"]
    assert [told.items() <= each.items() for each in latest[:4]] == [False, True, True, False]
    lines = [record.__dict__["fields"] for record in caplog.records if record.name == "keepgate.requests"]
    lines = [line for line in lines if "family" in line]
    assert [told.items() <= line.items() for line in lines] == [False, True, True, False]
    assert ANSWER not in caplog.text
    figures = (await client.get("/v1/cache/stats")).json["predictions"]["sources"]["stale"]
    assert figures["accepted_tokens"] == accepted + 12


async def test_a_client_that_predicts_sees_its_own_tokens(stage: Stage) -> None:
    """They are its to know, and no prediction of the gateway's."""
    mock = await stage.mock(billed())
    client = await predicting(stage, mock)
    answer = await client.post(chat(prediction={"type": "content", "content": "mine"}))
    assert answer.json["usage"] == USAGE
    (latest, *_) = (await client.get("/v1/requests")).json["data"]
    assert "prediction" not in latest


def test_words_of_an_answer_are_no_counts() -> None:
    """Only fields are changed, not a text that quotes them."""
    text = json.dumps({"content": '{"accepted_prediction_tokens": 5, "rejected_prediction_tokens":1}'}).encode()
    assert without_prediction_tokens(text) == (text, None)
    counted = text[:-1] + b', "rejected_prediction_tokens" :\n12, "accepted_prediction_tokens":3}'
    shown, tokens = without_prediction_tokens(counted)
    assert tokens == PredictionTokens(3, 12)
    assert json.loads(shown) == {**json.loads(text), **UNPREDICTED}
