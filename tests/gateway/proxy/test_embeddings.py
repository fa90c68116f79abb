"""Embeddings are stored per input: a batch asks the upstream for what is not there, and for nothing twice."""

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.proxy.embeddings import _shares
from gateway.settings.upstreams import RetrySettings
from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Answer, Client
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, json_reply, saying
from tests.waiting import until

EMBEDDINGS = "/v1/embeddings"


def of(*inputs: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "mock", "input": list(inputs), **fields}


async def ask(client: Client, *inputs: Any, **headers: str) -> Answer:
    return await client.send("POST", EMBEDDINGS, of(*inputs), {n.replace("_", "-"): v for n, v in headers.items()})


def vectors(answer: Answer) -> list[Any]:
    assert [item["index"] for item in answer.json["data"]] == list(range(len(answer.json["data"])))
    return [item["embedding"] for item in answer.json["data"]]


def sent(mock: MockUpstream) -> list[Any]:
    return [received.fields["input"] for received in mock.received]


async def test_a_batch_asks_only_for_what_is_not_stored(stage: Stage) -> None:
    """Of 100 texts of which 90 are known, 10 go to the upstream, and the answer is that of one that knows none."""
    mock = await stage.mock()
    client, fresh = await stage.gateway(mock), await stage.gateway(mock)
    texts = [f"text number {number}" for number in range(100)]
    await ask(client, *texts[:90])
    mixed = await ask(client, *texts)
    whole = await ask(fresh, *texts)

    assert sent(mock)[1] == texts[90:]
    assert vectors(mixed) == vectors(whole)
    assert mixed.json["usage"] == whole.json["usage"]
    assert (mixed.cache, mixed.cache_status.fwd) == ("miss", "partial")
    assert mixed.cache_status.parameters["detail"] == "90 of 100 inputs"


async def test_a_batch_that_is_all_stored_is_a_hit(stage: Stage) -> None:
    """In any order, and one text alone has the entry that it has in a batch."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    first = await ask(client, "one", "two", "three")
    again = await ask(client, "three", "one")
    alone = await client.send("POST", EMBEDDINGS, {"model": "mock", "input": "two"}, {})

    assert (first.cache, again.cache, alone.cache) == ("miss", "hit", "hit")
    assert [*vectors(alone), *vectors(again)] == [vectors(first)[i] for i in (1, 2, 0)]
    assert len(mock.received) == 1


async def test_a_body_of_which_nothing_is_stored_goes_through_untouched(stage: Stage) -> None:
    """So does the answer, with fields that no specification has."""
    body = b'{"x":[1.50],"data":[{"embedding":[1e-3,2.50],"index":0,"y":1}],"model":"m","usage":{"prompt_tokens":1}}'
    raw = await stage.raw(saying(json_reply(body)))
    client = await stage.gateway(raw)
    first = await ask(client, "one")
    again = await ask(client, "one")

    assert first.body == body
    assert again.cache == "hit"
    assert b'"embedding":[1e-3,2.50]' in again.body
    assert again.json["data"][0]["y"] == 1


@pytest.mark.parametrize("inputs", [[1, 2, 3], [[1, 2], [3]], ["a", "a", "b"]], ids=str)
async def test_every_form_of_input_is_stored(stage: Stage, inputs: list[Any]) -> None:
    """Token ids, lists of them, and texts that are there twice, which are computed once."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    first, again = await ask(client, *inputs), await ask(client, *inputs)

    assert (first.status, again.cache) == (200, "hit")
    assert vectors(first) == vectors(again)
    assert len(vectors(first)) == (1 if isinstance(inputs[0], int) else len(inputs))
    assert sent(mock) == [["a", "b"] if inputs[0] == "a" else inputs]


@pytest.mark.parametrize("fields", [{"dimensions": 2}, {"encoding_format": "base64"}, {"model": "other"}, {"x": 1}])
async def test_every_other_field_is_part_of_the_key(stage: Stage, fields: dict[str, Any]) -> None:
    """Another model, dimension or encoding is another entry."""
    client = await stage.gateway(await stage.mock())
    await ask(client, "one")
    assert (await client.send("POST", EMBEDDINGS, of("one", **fields), {})).cache == "miss"


async def test_tenants_do_not_share_embeddings(stage: Stage) -> None:
    """Each credential has entries of its own."""
    client = await stage.gateway(await stage.mock())
    await client.tenant("sk-a").send("POST", EMBEDDINGS, of("one"), {})
    assert (await client.tenant("sk-b").send("POST", EMBEDDINGS, of("one"), {})).cache == "miss"


async def test_an_input_in_flight_is_computed_once(stage: Stage) -> None:
    """Batches that overlap share what they have in common, and a client that leaves takes nothing from the others."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    leaving = asyncio.create_task(ask(client, "a", "b"))
    await mock.wait_for(1)
    staying = asyncio.create_task(ask(client, "b", "c"))
    await mock.wait_for(2)
    leaving.cancel()
    mock.hold.set()

    assert len(vectors(await staying)) == 2
    assert sent(mock) == [["a", "b"], ["c"]]


async def test_cache_control_is_honoured(stage: Stage) -> None:
    """no-store and no-cache compute, only-if-cached does not; only no-store stores nothing."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    assert (await ask(client, "one", Cache_Control="only-if-cached")).status == 504
    assert (await ask(client, "one", Cache_Control="no-store")).cache == "bypass"
    assert (await ask(client, "one")).cache == "miss"
    assert (await ask(client, "one", Cache_Control="no-cache")).cache == "bypass"
    assert (await ask(client, "one", Cache_Control="only-if-cached")).cache == "hit"
    assert len(mock.received) == 3


async def test_an_error_of_the_upstream_is_passed_on_and_not_stored(stage: Stage) -> None:
    """With its status and body; the next request is computed."""
    mock = await stage.mock(Reply(status=429, error={"message": "slow down"}))
    client = await stage.gateway(mock)
    refused = await ask(client, "one")
    mock.replies.clear()

    assert (refused.status, refused.json["error"]["message"]) == (429, "slow down")
    assert (await ask(client, "one")).cache == "miss"


async def test_an_upstream_may_forbid_storing(stage: Stage) -> None:
    """Embeddings that come with `Cache-Control: no-store` are not stored."""
    client = await stage.gateway(await stage.mock(Reply(headers={"Cache-Control": "no-store"})))
    assert [(await ask(client, "one")).cache for _ in range(2)] == ["miss", "miss"]


@pytest.mark.parametrize(
    "data", [[], [{"index": 1, "embedding": [1]}], [{"embedding": [1]}], "none", [{"index": "0"}], [{"index": 0}]]
)
async def test_a_list_that_does_not_fit_is_a_502(stage: Stage, data: Any) -> None:
    """An answer with another number of items than inputs, or without their places, is served to nobody."""
    raw = await stage.raw(saying(json_reply(msgspec.json.encode({"object": "list", "data": data}))))
    answer = await ask(await stage.gateway(raw), "one")
    assert (answer.status, answer.error["code"]) == (502, "upstream_cut")


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a"},
        {"model": "mock"},
        {"model": "mock", "input": []},
        {"model": "mock", "input": [[]]},
        {"model": "mock", "input": 5},
        {"model": "mock", "input": [1, "a"]},
        {"model": "mock", "input": [{"type": "image_url"}]},
        {"model": "mock", "messages": []},
    ],
    ids=str,
)
async def test_a_body_in_another_form_is_relayed(stage: Stage, body: dict[str, Any]) -> None:
    """Other servers embed images and conversations: their bodies pass unread, and are not cached."""
    mock = await stage.mock(Reply(status=422, error={"message": "what is this?"}))
    client = await stage.gateway(mock)
    answers = [await client.send("POST", EMBEDDINGS, body, {}) for _ in range(2)]

    assert [(answer.status, answer.cache) for answer in answers] == [(422, "bypass")] * 2
    assert [received.fields for received in mock.received] == [body] * 2


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**31), st.lists(st.integers(0, 10_000), min_size=1, max_size=50))
def test_shares_of_tokens_add_up(tokens: int, lengths: list[int]) -> None:
    """No token is lost or made up when a batch's usage is divided among its inputs."""
    shares = _shares(tokens, lengths)
    assert len(shares) == len(lengths)
    assert min(shares) >= 0
    assert sum(shares) == (tokens if any(lengths) else 0)


@pytest.mark.parametrize("fault", ["cut", "no JSON", "silent"])
async def test_another_upstream_computes_what_one_does_not_send_whole(stage: Stage, fault: str) -> None:
    """An answer that breaks off, is no JSON or stands still is asked for elsewhere."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"

    async def fail(connection: Connection) -> None:
        if fault == "no JSON":
            await connection.send(json_reply(b'{"data": ['))
            return
        await connection.send(head + b'Content-Length: 900\r\n\r\n{"data": [')
        if fault == "silent":
            await connection.closed()

    broken, mock = await stage.raw(fail), await stage.mock()
    client = await stage.gateway(broken, mock, retries=RetrySettings(), timeouts={"idle": 0.2})
    answer = await ask(client, "one")
    assert answer.status == 200, answer.body
    assert len(vectors(answer)) == 1


async def test_embeddings_have_a_deadline(stage: Stage) -> None:
    """A client gets 504 at its own deadline, also where it waits for the call of another one."""

    async def hang(connection: Connection) -> None:
        await connection.closed()

    upstream = await stage.raw(hang)
    client = await stage.gateway(upstream)
    refused = await ask(client, "one", x_request_timeout="0.2")
    assert (refused.status, refused.error["code"]) == (504, "upstream_timeout")
    patient = asyncio.create_task(ask(client, "two"))
    await until(lambda: len(upstream.connections) == 2)
    joined = await ask(client, "two", x_request_timeout="0.2")
    assert (joined.status, len(upstream.connections)) == (504, 2)
    patient.cancel()
