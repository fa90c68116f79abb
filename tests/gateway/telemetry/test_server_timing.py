"""A request with `x-keepgate-profile` is told where its time went: the header Server-Timing, and `/v1/requests`."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from gateway.settings.operations import TraceSettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.proxy.aging import grow_old
from tests.gateway.telemetry.test_gateway_traces import spans_in
from tests.gateway.wire import request_bytes, wire
from tests.waiting import until

OF_A_MISS = ["request.read", "cache.lookup", "semantic.lookup", "admission", "upstream.first_byte", "upstream.body"]
DELAY = 0.05
JOINABLE = 0.5
"""So long another request has to join a call, also on a busy machine."""


def parts_of(header: str) -> dict[str, float]:
    """Milliseconds by name."""
    return {name: float(duration) for name, duration in (part.split(";dur=") for part in header.split(", "))}


async def last_timings(client: Client, request_id: str) -> dict[str, float]:
    listed = (await client.get("/v1/requests")).json["data"]
    (found,) = [each for each in listed if each["id"] == request_id]
    timings: dict[str, float] = found.get("timings", {})
    return timings


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_miss_tells_its_parts(stage: Stage, path: str) -> None:
    """In any form of API; they are at least what the upstream took, and at most the whole."""
    client = await stage.gateway(await stage.mock(Reply(delay=DELAY)))
    answer = await client.post({**chat("one"), "max_tokens": 9}, path, x_keepgate_profile="1")
    parts = parts_of(answer.headers["Server-Timing"])
    assert set(OF_A_MISS) <= set(parts)
    assert DELAY * 1e3 <= parts["upstream.first_byte"] <= parts["total"]
    assert sum(parts[name] for name in OF_A_MISS) <= parts["total"] + 0.01
    timings = await last_timings(client, answer.headers["x-request-id"])
    assert timings["cache.store"] >= 0
    assert abs(timings["upstream.first_byte"] * 1e3 - parts["upstream.first_byte"]) < 0.01


async def test_who_does_not_ask_is_told_nothing(stage: Stage) -> None:
    """Neither of a miss nor of a hit; who asks about a hit is told what looking it up took."""
    client = await stage.gateway(await stage.mock())
    for _ in range(3):
        answer = await client.post(chat())
        assert "Server-Timing" not in answer.headers
        assert not await last_timings(client, answer.headers["x-request-id"])
    hit = await client.post(chat(), x_keepgate_profile="1")
    assert hit.cache == "hit"
    assert list(parts_of(hit.headers["Server-Timing"])) == ["request.read", "cache.lookup", "total"]


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages"])
async def test_the_parts_of_a_stream_follow_it(stage: Stage, path: bytes) -> None:
    """Its head tells the parts until then; a client that reads trailers gets all of them after the body."""
    client = await stage.gateway(await stage.mock(Reply(pause=0.02)))
    body = msgspec.json.encode({**chat("one two three", stream=True), "max_tokens": 9})
    async with wire(client) as connection:
        await connection.send(request_bytes(body, b"TE: trailers", b"x-keepgate-profile: 1", path=path))
        answer = await connection.answer()
        at_first, at_last = map(parts_of, answer.headers.getall("Server-Timing"))
        assert answer.headers["Trailer"].endswith(", Server-Timing")
        await connection.send(request_bytes(body, b"x-keepgate-profile: 1", path=path))
        hit = await connection.answer()
        assert len(hit.headers.getall("Server-Timing")) == 1
    assert "upstream.body" not in at_first
    assert at_last["upstream.body"] >= 20
    assert at_first["total"] + at_last["upstream.body"] <= at_last["total"] + 1
    assert at_first["cache.lookup"] == at_last["cache.lookup"]


async def test_an_upstreams_own_timing_is_beside_the_gateways(stage: Stage) -> None:
    """Under names of its own."""
    mock = await stage.mock(Reply(headers={"Server-Timing": 'edge;desc="HIT, \\"near\\"";dur=3,decode;dur=4'}))
    client = await stage.gateway(mock)
    (told,) = (await client.post(chat(), x_keepgate_profile="1")).headers.getall("Server-Timing")
    assert told.endswith(', upstream.edge;desc="HIT, \\"near\\"";dur=3, upstream.decode;dur=4')
    assert parts_of(told.partition(", upstream.edge")[0])["total"] > 0
    assert [request.headers["x-keepgate-profile"] for request in mock.received] == ["1"]  # the engine is asked as well


async def test_who_joins_is_told_of_its_own_wait(stage: Stage) -> None:
    """The upstream call itself is that of the first one."""
    mock = await stage.mock(Reply(delay=JOINABLE, headers={"Server-Timing": "of the first"}))
    client = await stage.gateway(mock)
    first = asyncio.create_task(client.post(chat()))
    await mock.wait_for(1)
    joined, silent = await asyncio.gather(client.post(chat(), x_keepgate_profile="1"), client.post(chat()))
    assert (await first).headers["Server-Timing"] == "of the first"  # as it has always been passed on
    assert "Server-Timing" not in silent.headers
    parts = parts_of(joined.headers["Server-Timing"])
    assert "upstream" not in parts
    assert 0 < parts["upstream.first_byte"] < parts["total"]


async def test_what_goes_on_behind_a_hit_is_no_part_of_it(stage: Stage) -> None:
    """A stale answer is computed again after it was served."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"stale_while_revalidate": 600.0})
    await grow_old(client, (await client.post(chat())).entry, 86_400 + 60)
    hit = await client.post(chat(), x_keepgate_profile="1")
    assert hit.cache == "hit"
    await mock.wait_for(2)
    await client.until("flights", 0)
    assert set(await last_timings(client, hit.headers["x-request-id"])) == {"request.read", "cache.lookup"}


async def test_the_parts_of_an_answer_that_is_too_long_to_be_kept(stage: Stage) -> None:
    """They are counted once: no more than the whole."""
    mock = await stage.mock(Reply(text="word " * 20_000, delay=DELAY))
    client = await stage.gateway(mock, cache={"max_answer": 2**14})
    answer = await client.post(chat(), x_keepgate_profile="1")
    await client.until("flights", 0)
    timings = await last_timings(client, answer.headers["x-request-id"])
    listed = (await client.get("/v1/requests")).json["data"]
    assert timings["upstream.first_byte"] + timings["upstream.body"] <= listed[0]["seconds"]


async def test_embeddings_and_refusals_have_parts(stage: Stage) -> None:
    """A miss and a hit of embeddings."""
    client = await stage.gateway(await stage.mock(Reply(delay=DELAY)))
    asked = {"model": "mock", "input": ["a", "b"]}
    for cache, more in (("miss", {"admission", "upstream.body"}), ("hit", set())):
        answer = await client.post(asked, "/v1/embeddings", x_keepgate_profile="1")
        assert answer.cache == cache
        assert set(parts_of(answer.headers["Server-Timing"])) == {"request.read", "cache.lookup", "total"} | more


async def test_a_failure_tells_its_parts_too(stage: Stage) -> None:
    """Those that it came to."""
    client = await stage.gateway(await stage.mock(Reply(status=400, error={"message": "no"})))
    failed = await client.post(chat(), x_keepgate_profile="1")
    assert failed.status == 400
    assert {"request.read", "cache.lookup", "upstream.first_byte"} <= set(parts_of(failed.headers["Server-Timing"]))
    refused = await client.post({"model": 5}, x_keepgate_profile="1")
    assert refused.status == 400
    assert list(parts_of(refused.headers["Server-Timing"])) == ["request.read", "total"]


async def test_traces_go_on_beside_it(stage: Stage, tmp_path: Path) -> None:
    """A request that is both traced and profiled has both; who joins it has a link to its call."""
    file = tmp_path / "traces.jsonl"
    mock = await stage.mock(Reply(delay=JOINABLE))
    client = await stage.gateway(mock, traces=TraceSettings(exporter="file", file=str(file), share=1.0))
    first = asyncio.create_task(client.post(chat(), x_keepgate_profile="1"))
    await mock.wait_for(1)
    await client.post(chat())
    assert "cache.lookup" in parts_of((await first).headers["Server-Timing"])
    await until(lambda: file.exists() and sum(s["name"].startswith("POST") for s in spans_in(file)) == 2, 10)
    spans = spans_in(file)
    call = next(span for span in spans if span["name"] == "chat mock")
    assert [link["spanId"] for span in spans for link in span.get("links", ())] == [call["spanId"]]
