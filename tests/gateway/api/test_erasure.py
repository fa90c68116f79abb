"""Erasing a tenant: nothing of it is left in any worker or in Redis, and everything of others stays."""

import asyncio
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from cache.stores.erasure import pattern
from tests.cache.valkey import Valkey
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage

CACHE = "/v1/cache"
RESPONSES = "/v1/responses"


def settings(valkey: Valkey | None, **more: Any) -> dict[str, Any]:
    return {"redis": valkey.url if valkey else "none", **more}


async def namespace_of(client: Client) -> str:
    """The namespace of a client's credential."""
    return (await client.post(chat("who am I?"))).entry.partition(".")[0]


async def fill(client: Client) -> None:
    """Three answers and a response that can be continued."""
    for text in ("one", "two"):
        assert (await client.post(chat(text))).status == 200
    answer = await client.post({"model": "mock", "input": "three", "temperature": 0}, RESPONSES)
    assert answer.status == 200


async def flushed(client: Client) -> None:
    store = client.gateway.cache.redis
    assert store is not None
    await store.flush()


async def names(raw: redis.asyncio.Redis, namespace: str) -> list[bytes]:
    return [name async for name in raw.scan_iter(match=f"keepgate:*:{namespace}.*")]


async def test_nothing_of_an_erased_tenant_is_left(stage: Stage, valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """Every key of the tenant is gone from Redis and from all workers' memory; other tenants keep theirs."""
    mock = await stage.mock()
    first = await stage.gateway(mock, **settings(valkey))
    second = await stage.gateway(mock, **settings(valkey))
    red, blue = first.tenant("red"), first.tenant("blue")
    ours, theirs = await namespace_of(red), await namespace_of(blue)
    for client in (red, blue):
        await fill(client)
    await flushed(first)
    assert (await second.tenant("red").post(chat("one"))).cache == "hit"
    assert (await second.tenant("blue").post(chat("one"))).cache == "hit"
    kept = sorted(await names(raw, theirs))
    assert len(await names(raw, ours)) >= 4

    erased = await first.send("DELETE", f"{CACHE}?tenant={ours}")

    assert erased.status == 200
    assert erased.json["found"] == erased.json["removed"] >= 4
    assert (erased.json["erased"], erased.json["tenant"]) == ("tenant", ours)
    assert (erased.json["remaining"], erased.json["verified"]) == (0, True)
    assert 0 < erased.json["seconds"] < 20
    assert await names(raw, ours) == []
    assert sorted(await names(raw, theirs)) == kept
    async with asyncio.timeout(10):
        await second.until("memory_entries", 1)
    assert (await second.tenant("blue").post(chat("one"))).cache == "hit"
    assert (await second.tenant("red").post(chat("one"))).cache == "miss"

    again = await first.send("DELETE", f"{CACHE}?tenant=nobody")
    assert (again.json["found"], again.json["removed"], again.json["verified"]) == (0, 0, True)


async def test_a_tenant_is_erased_from_a_gateway_without_a_redis(stage: Stage) -> None:
    """Without a Redis the answers and the conversations in memory are removed and counted."""
    client = await stage.gateway(await stage.mock(), **settings(None))
    red, blue = client.tenant("red"), client.tenant("blue")
    ours = await namespace_of(red)
    for tenant in (red, blue):
        await fill(tenant)
    answer = await red.post({"model": "mock", "input": "three", "temperature": 0}, RESPONSES)

    erased = await client.send("DELETE", f"{CACHE}?tenant={ours}")

    assert erased.json["found"] == erased.json["removed"] >= 4
    assert erased.json["verified"] is True
    assert (await red.get(f"{RESPONSES}/{answer.json['id']}")).status == 404
    assert (await red.post(chat("one"))).cache == "miss"
    assert (await blue.post(chat("one"))).cache == "hit"


async def test_an_erasure_without_its_redis_is_503(stage: Stage, own_valkey: Valkey) -> None:
    """While Redis is away an erasure fails, though nothing of the tenant is served, and can be repeated."""
    client = await stage.gateway(await stage.mock(), **settings(own_valkey))
    red = client.tenant("red")
    ours = await namespace_of(red)
    await fill(red)
    await flushed(client)
    await own_valkey.kill()

    refused = await client.send("DELETE", f"{CACHE}?tenant={ours}")

    assert refused.status == 503
    assert "Repeat the request" in refused.error["message"]
    assert (await red.post(chat("one"))).cache != "hit"
    await own_valkey.start()
    store = client.gateway.cache.redis
    assert store is not None
    async with asyncio.timeout(15):
        await store.breaker.wait_closed()
    assert (await client.send("DELETE", f"{CACHE}?tenant={ours}")).json["verified"] is True


@pytest.mark.parametrize("query", ["?tenant=", "?tenant=a&tenant=b", "?tenant=a&model=b", "?tenant=a&namespace=a"])
async def test_an_ambiguous_erasure_is_refused(stage: Stage, query: str) -> None:
    """An empty or repeated tenant, or one beside another scope, gives 400 and erases nothing."""
    client = await stage.gateway(await stage.mock())
    await client.post(chat())

    assert (await client.send("DELETE", CACHE + query)).status == 400
    assert (await client.post(chat())).cache == "hit"


async def test_an_erasure_is_for_the_operator(stage: Stage) -> None:
    """A tenant cannot erase, itself neither."""
    client = await stage.gateway(await stage.mock(), admin_key="the-admin-key")
    red = client.tenant("red")
    ours = await namespace_of(red)

    assert (await red.send("DELETE", f"{CACHE}?tenant={ours}")).status == 401
    assert (await red.post(chat("who am I?"))).cache == "hit"


@given(st.text(alphabet="ab*?[]^-\\", min_size=1, max_size=6), st.text(alphabet="ab*?[]^-\\", min_size=1, max_size=6))
async def test_a_namespace_matches_itself_alone(shared_valkey: Valkey, namespace: str, other: str) -> None:
    """The pattern of a namespace matches its own keys, and those of no other, whatever characters it has."""
    raw = redis.asyncio.Redis.from_url(shared_valkey.url)
    await raw.flushall()
    await raw.mset({f"keepgate:entry:{each}.1": 1 for each in (namespace, other)})
    found = [name.decode() async for name in raw.scan_iter(match=pattern("keepgate:entry:", namespace))]
    await raw.aclose()
    assert found == [f"keepgate:entry:{namespace}.1"]
