"""Odd answers of an upstream are relayed unchanged, and the gateway does not fail."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import EVENT_STREAM, Connection, json_reply, saying

SHAPES: dict[str, dict[str, Any]] = {
    "json": {},
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
}

scalars = st.none() | st.booleans() | st.integers(-(2**31), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
json_values: st.SearchStrategy[Any] = st.recursive(
    scalars | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
odd_choices = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(0, 2) | json_values,
        "message": st.fixed_dictionaries(
            {}, optional={"content": json_values, "tool_calls": json_values, "role": json_values}
        )
        | json_values,
        "delta": st.fixed_dictionaries(
            {}, optional={"content": json_values, "tool_calls": json_values, "role": json_values}
        )
        | json_values,
        "text": json_values,
        "logprobs": json_values,
        "finish_reason": st.just("stop") | json_values,
    },
)
odd_answers = st.fixed_dictionaries(
    {"choices": st.lists(odd_choices | json_values, max_size=3) | json_values},
    optional={
        "object": json_values,
        "usage": st.fixed_dictionaries(
            {}, optional={"prompt_tokens": json_values, "completion_tokens": st.integers(-5, 2**70)}
        )
        | json_values,
        "error": json_values,
        "id": json_values,
        "model": json_values,
    },
)


class Oddity:
    """An upstream that answers with `body`, or streams it as `events`, and a gateway in front of it."""

    def __init__(self) -> None:
        self.body = b""
        self.number = 0

    async def converse(self, connection: Connection) -> None:
        if b'"stream":true' in connection.body:
            await connection.send(EVENT_STREAM + b"data: " + self.body + b"\n\ndata: [DONE]\n\n")
        else:
            await connection.send(json_reply(self.body))

    async def start(self, stage: Stage) -> Client:
        return await stage.gateway(await stage.raw(self.converse), cache={"ask_usage": False})


# The fixture is the running gateway; the examples share it on purpose.
many_upstreams = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
async def oddity(stage: Stage) -> tuple[Oddity, Client]:
    odd = Oddity()
    return odd, await odd.start(stage)


@many_upstreams
@given(body=odd_answers, second=st.sampled_from(list(SHAPES)))
async def test_any_json_body_of_an_upstream_is_relayed_as_it_is(
    oddity: tuple[Oddity, Client], body: dict[str, Any], second: str
) -> None:
    """Any JSON body of an upstream is relayed, and no later request for it fails."""
    upstream, client = oddity
    upstream.body = msgspec.json.encode(body)
    upstream.number += 1
    question = f"question {upstream.number}"
    first = await client.post(chat(question))
    again = await client.post(chat(question, **SHAPES[second]))

    assert (first.status, first.body) == (200, upstream.body)
    assert again.status == 200
    if second == "json":
        assert again.body == upstream.body


@many_upstreams
@given(chunk=odd_answers, second=st.sampled_from(list(SHAPES)))
async def test_any_events_of_an_upstream_are_relayed_as_they_are(
    oddity: tuple[Oddity, Client], chunk: dict[str, Any], second: str
) -> None:
    """Any events of an upstream are relayed, and no later request for them fails."""
    upstream, client = oddity
    upstream.body = msgspec.json.encode(chunk)
    upstream.number += 1
    question = f"question {upstream.number}"
    first = await client.post(chat(question, stream=True))
    again = await client.post(chat(question, **SHAPES[second]))

    assert (first.status, first.events) == (200, [upstream.body, b"[DONE]"])
    assert again.status == 200


async def test_an_answer_too_deep_to_be_recorded_is_still_relayed(stage: Stage) -> None:
    """A stream with a field nested hundreds of levels deep reaches its client completely."""
    deep = b'{"a":' * 600 + b"1" + b"}" * 600
    event = b'{"choices":[{"index":0,"delta":{"content":"hi","x":%s},"finish_reason":"stop"}]}' % deep
    raw = await stage.raw(saying(EVENT_STREAM + b"data: " + event + b"\n\ndata: [DONE]\n\n"))
    client = await stage.gateway(raw)
    first, second = [await client.post(chat(stream=True)) for _ in range(2)]

    assert first.events == [event, b"[DONE]"]
    assert second.status == 200


ODD_CHOICES: dict[str, dict[str, Any]] = {
    "tool calls that are a number": {"message": {"content": "hi", "tool_calls": 5}},
    "tool calls that are text": {"message": {"content": "hi", "tool_calls": ["x", None]}},
    "a message that is text": {"message": "hi"},
    "a message that is a list": {"message": ["hi"]},
    "logprobs that are a number": {"message": {"content": "hi"}, "logprobs": 5},
    "logprobs of numbers": {"message": {"content": "hi"}, "logprobs": {"content": [1, 2]}},
    "logprobs of tokens that are numbers": {"message": {"content": "12"}, "logprobs": {"content": [{"token": 12}]}},
    "an index that is text": {"index": "a", "message": {"content": "hi"}},
    "an index that is nothing": {"index": None, "message": {"content": "hi"}},
    "an index twice": {"index": 0, "message": {"content": "hi"}},
    "content that is an object": {"message": {"content": {"a": 1}}},
    "text that is a number": {"text": 5},
    "text and a message": {"text": "hi", "message": {"content": "ho"}},
    "a finish reason that is a list": {"message": {"content": "hi"}, "finish_reason": ["stop"]},
}


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("choice", ODD_CHOICES.values(), ids=ODD_CHOICES.keys())
async def test_an_answer_of_an_odd_form_fails_no_later_request(
    stage: Stage, choice: dict[str, Any], second: str
) -> None:
    """An answer of an unusual form, stored or not, gives no later request a 500."""
    good = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
    body = msgspec.json.encode({"choices": [good, {"index": 1, "finish_reason": "stop", **choice}]})
    client = await stage.gateway(await stage.raw(saying(json_reply(body))))
    first = await client.post(chat())
    later = [await client.post(chat(**SHAPES[second])) for _ in range(2)]

    assert (first.status, first.body) == (200, body)
    assert {answer.status for answer in later} == {200}


@pytest.mark.parametrize(
    "count",
    [-1, -(2**63), 2**31, 2**53, 2**63, 2**64, 2**70, 10**300, 1.5, 1e300, True, "12", [], {"a": 1}, None],
    ids=lambda count: str(count)[:24],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_impossible_token_count_does_no_harm(stage: Stage, valkey: Valkey, stream: bool, count: Any) -> None:
    """An answer with an impossible token count is relayed, and figures and store go on."""
    field = "delta" if stream else "message"
    chunk = {
        "choices": [{"index": 0, field: {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": count, "completion_tokens": count, "total_tokens": count},
    }
    body = json.dumps(chunk).encode()
    reply = EVENT_STREAM + b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else json_reply(body)
    client = await stage.gateway(await stage.raw(saying(reply)), redis=valkey.url)
    answers = [await client.post(chat(stream=stream)) for _ in range(3)]
    store = client.gateway.cache.redis
    assert store is not None
    await store.flush()

    assert {answer.status for answer in answers} == {200}
    assert body in answers[0].body
    assert (await client.get("/v1/cache/stats")).status == 200
    assert (await client.post(chat("another"))).status == 200
