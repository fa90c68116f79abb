"""A store that freezes, ends or returns: no request fails, and no failure counts as a miss."""

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import aiohttp
import pytest
import redis.asyncio

from cache.errors import StoreUnavailable
from gateway.processes.app import open_gateway
from gateway.settings.settings import Settings
from tests.cache.valkey import Valkey
from tests.gateway.client import DEADLINE, Client, chat
from tests.gateway.conftest import HASTY, Stage


async def flushed(client: Client) -> None:
    """Return when everything the gateway learned is in the store, which a busy machine may take for a dead one."""
    store = client.gateway.cache.redis
    assert store is not None
    async with asyncio.timeout(DEADLINE):
        while True:
            await store.breaker.wait_closed()
            with contextlib.suppress(StoreUnavailable):
                await store.flush()
                return


async def until_available(client: Client) -> None:
    store = client.gateway.cache.redis
    assert store is not None
    async with asyncio.timeout(DEADLINE):
        await store.breaker.wait_closed()


async def test_a_restarted_gateway_has_its_hits(stage: Stage, valkey: Valkey) -> None:
    """An answer cached before a restart is a hit after it, in every shape, byte for byte."""
    mock = await stage.mock()
    first = await stage.gateway(mock, redis=valkey.url)
    computed = [await first.tenant(tenant).post(chat(tenant)) for tenant in ("a", "b")]
    await flushed(first)
    second = await stage.gateway(mock, redis=valkey.url)
    again = [await second.tenant(tenant).post(chat(tenant)) for tenant in ("a", "b")]
    streamed = await second.tenant("a").post(chat("a", stream=True))

    assert [(answer.cache, answer.body) for answer in again] == [("hit", answer.body) for answer in computed]
    assert (streamed.cache, streamed.text) == ("hit", "a")
    assert len(mock.received) == 2


async def test_closing_the_gateway_writes_what_is_pending(valkey: Valkey, stage: Stage, tmp_path: Path) -> None:
    """A stop right after an answer does not lose the answer."""
    mock = await stage.mock()
    settings = Settings(port=0, redis=valkey.url, upstreams=(mock.url,), state_dir=str(tmp_path))
    async with aiohttp.ClientSession() as session:
        for expected in ("miss", "hit"):
            async with (
                open_gateway(settings) as gateway,
                session.post(gateway.url + "/v1/chat/completions", json=chat()) as response,
            ):
                assert response.headers["x-keepgate-cache"] == expected
                await response.read()
    assert len(mock.received) == 1


async def test_gateways_share_their_answers(stage: Stage, valkey: Valkey) -> None:
    """An answer of one gateway is a hit in another."""
    mock = await stage.mock()
    one, other = [await stage.gateway(mock, redis=valkey.url) for _ in range(2)]
    await one.post(chat())
    await flushed(one)

    assert (await other.post(chat())).cache == "hit"


async def test_a_frozen_store_fails_no_request(stage: Stage, own_valkey: Valkey) -> None:
    """A store that freezes under load fails no request and costs at most one deadline once."""
    mock = await stage.mock()
    client = await stage.gateway(mock, redis=own_valkey.url, cache=HASTY)
    await asyncio.gather(*(client.post(chat(f"known {n}")) for n in range(20)))
    await flushed(client)
    store = client.gateway.cache.redis
    assert store is not None
    slowest = 0.0
    answered = 0
    opened_before = 0
    frozen = asyncio.Event()

    async def load(worker: int) -> None:
        nonlocal slowest, answered, opened_before
        for number in range(30):
            began = time.monotonic()
            answer = await client.post(chat(f"new {worker} {number}", stream=bool(number % 2)))
            assert answer.status == 200
            assert answer.text == f"new {worker} {number}"
            slowest = max(slowest, time.monotonic() - began)
            assert (await client.post(chat(f"known {number % 20}"))).cache == "hit"
            answered += 1
            if worker == 0 and number == 10:
                opened_before = store.breaker.times_opened
                own_valkey.freeze()
                frozen.set()

    try:
        await asyncio.gather(*(load(worker) for worker in range(8)))
        assert store.breaker.is_open
    finally:
        own_valkey.thaw()

    assert frozen.is_set()
    assert answered == 240
    # One deadline is 20 ms; the rest is what a busy machine may need.
    assert slowest < 1.0
    assert store.breaker.times_opened - opened_before <= 1


async def test_a_failed_lookup_is_counted_as_one(stage: Stage, own_valkey: Valkey) -> None:
    """A failed lookup is a failure and no miss in Cache-Status and in the figures."""
    client = await stage.gateway(await stage.mock(), redis=own_valkey.url, cache=HASTY)
    own_valkey.freeze()
    try:
        before = {
            kind: await client.figure("requests_total", cache=kind) for kind in ("hit", "miss", "bypass", "failed")
        }
        answers = [await client.post(chat(f"{number}")) for number in range(3)]
        after = {kind: await client.figure("requests_total", cache=kind) for kind in before}
        stats = (await client.get("/v1/cache/stats")).json
    finally:
        own_valkey.thaw()

    assert {kind: after[kind] - before[kind] for kind in before} == {"hit": 0, "miss": 0, "bypass": 0, "failed": 3}
    assert {answer.cache_status.detail for answer in answers} == {"store-unavailable"}
    assert {answer.cache_status.fwd for answer in answers} == {"miss"}
    assert stats["layers"]["exact"]["tiers"]["redis"]["available"] is False
    assert (await client.get("/metrics")).status == 200


async def test_memory_serves_while_the_store_is_away(stage: Stage, own_valkey: Valkey) -> None:
    """Answers that are stored during an outage are hits from memory."""
    client = await stage.gateway(await stage.mock(), redis=own_valkey.url, cache=HASTY)
    own_valkey.freeze()
    try:
        answers = [await client.post(chat()) for _ in range(3)]
    finally:
        own_valkey.thaw()

    assert [answer.cache for answer in answers] == ["miss", "hit", "hit"]


async def test_a_store_that_comes_back_is_used_again(stage: Stage, own_valkey: Valkey) -> None:
    """Answers of an outage are written to the store after it, where other gateways find them."""
    mock = await stage.mock()
    client = await stage.gateway(mock, redis=own_valkey.url)
    await own_valkey.kill()
    answer = await client.post(chat())
    assert (answer.status, answer.cache) == (200, "miss")
    await own_valkey.start()
    await until_available(client)
    await flushed(client)
    other = await stage.gateway(mock, redis=own_valkey.url)

    assert (await other.post(chat())).cache == "hit"


async def test_a_gateway_starts_without_its_store(stage: Stage, folder: Path) -> None:
    """The gateway starts without its store, and uses it once it is available."""
    server = Valkey(folder)
    client = await stage.gateway(await stage.mock(), redis=server.url)
    answer = await client.post(chat())
    assert (answer.status, answer.cache_status.detail) == (200, "store-unavailable")
    await server.start()
    try:
        await until_available(client)
        await flushed(client)
        stats = (await client.get("/v1/cache/stats")).json
        assert stats["layers"]["exact"]["tiers"]["redis"]["available"] is True
    finally:
        await server.stop()


@pytest.mark.parametrize("path", ["/v1/cache", "/v1/cache?model=mock"])
async def test_a_purge_that_cannot_reach_the_store_is_503(
    stage: Stage, own_valkey: Valkey, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A purge that cannot reach the store holds in its own gateway and gives 503; the audit has it."""
    caplog.set_level(logging.INFO)
    client = await stage.gateway(await stage.mock(), redis=own_valkey.url)
    await client.post(chat())
    await own_valkey.kill()
    refused = await client.send("DELETE", path)

    assert (refused.status, refused.error["code"]) == (503, "store_unavailable")
    assert [record.__dict__["fields"]["action"] for record in caplog.records if record.name == "keepgate.audit"] == [
        "cache.purge"
    ]
    assert (await client.post(chat())).cache == "miss"


async def test_entries_that_are_damaged_in_the_store_are_no_answers(stage: Stage, valkey: Valkey) -> None:
    """A damaged entry in the store is computed again and counted as a failure."""
    mock = await stage.mock()
    first = await stage.gateway(mock, redis=valkey.url)
    computed = await first.post(chat())
    await flushed(first)
    raw = redis.asyncio.Redis.from_url(valkey.url)
    names = [name async for name in raw.scan_iter("keepgate:entry:*")]
    for name in names:
        kept = await raw.get(name)
        assert isinstance(kept, bytes)
        await raw.set(name, kept[:-9] + b"damaged!!")
    await raw.aclose()
    second = await stage.gateway(mock, redis=valkey.url)
    answer = await second.post(chat())

    assert len(names) == 1
    assert (answer.status, answer.cache, answer.text) == (200, "miss", computed.text)
    assert answer.cache_status.detail == "store-unavailable"
