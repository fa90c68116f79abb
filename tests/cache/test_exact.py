"""The exact cache: memory in front of Redis, and four kinds of outcome that are never confused."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import redis.asyncio

from cache.entries.entry import Entry, encode_entry
from cache.entries.key import Key, namespace_for, request_key
from cache.entries.outcomes import Failed, Hit, Miss
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore, open_redis_store
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry
from tests.cache.valkey import Valkey
from tests.waiting import until

DEADLINE = 0.5


def key_of(number: int, namespace: str = "public") -> Key:
    return request_key(namespace, "chat.completions", {"model": "m", "n": number})


def answer_to(cache: ExactCache, key: Key, model: str = "m", **fields: Any) -> Entry:
    """An entry for a request that begins now."""
    generation = cache.generation(key.namespace, model)
    return entry(key.id, **{"proof": key.proof, "model": model, "generation": generation, **fields})


@asynccontextmanager
async def worker(url: str, deadline: float = PATIENT) -> AsyncIterator[ExactCache]:
    """A process's cache over the Redis at `url`, following the purges of others."""
    async with open_redis_store(url, deadline) as store:
        cache = ExactCache(MemoryStore(2**24), store, keep_stale=60)
        with suppress(StoreUnavailable):
            await cache.sync_purges()
        following = asyncio.create_task(cache.follow_purges())
        try:
            yield cache
        finally:
            assert not following.done(), following
            following.cancel()
            await asyncio.wait([following])


async def written(cache: ExactCache, kept: Entry) -> None:
    await cache.store(kept)
    assert cache.redis
    await cache.redis.flush()


async def tier_of(cache: ExactCache, key: Key) -> str:
    outcome = await cache.lookup(key)
    return outcome.tier if isinstance(outcome, Hit) else type(outcome).__name__


async def test_an_answer_is_found_in_every_tier(valkey: Valkey) -> None:
    """An answer is found in memory, in another process from Redis, and then in that process's memory."""
    key = key_of(1)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        assert await one.lookup(key) == Miss(("memory", "redis"))
        kept = answer_to(one, key)
        await written(one, kept)
        assert await tier_of(one, key) == "memory"
        assert await tier_of(other, key) == "redis"
        assert await tier_of(other, key) == "memory"
        found = await other.lookup(key)
        assert isinstance(found, Hit)
        assert found.entry == kept


async def test_an_answer_outlives_every_process(own_valkey: Valkey) -> None:
    """An answer is found after its process and Redis were restarted."""
    key = key_of(1)
    async with worker(own_valkey.url) as cache:
        await written(cache, answer_to(cache, key))
    await own_valkey.kill()
    await own_valkey.start()
    async with worker(own_valkey.url) as cache:
        assert await tier_of(cache, key) == "redis"


async def test_a_forged_collision_is_a_miss(valkey: Valkey) -> None:
    """A key with a known id and another proof is a miss in both tiers."""
    key = key_of(1)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        await written(one, answer_to(one, key))
        forged = Key(key.id, b"q" * 16)
        assert isinstance(await one.lookup(forged), Miss)
        assert isinstance(await other.lookup(forged), Miss)
        assert await tier_of(other, key) == "redis"


async def test_one_tenant_never_sees_the_answer_of_another(valkey: Valkey) -> None:
    """A tenant's key does not find another tenant's answer, even if that is stored under the key."""
    mine, yours = key_of(1, namespace_for("Bearer a")), key_of(1, namespace_for("Bearer b"))
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        await written(one, answer_to(one, mine))
        assert isinstance(await one.lookup(yours), Miss)
        assert isinstance(await other.lookup(yours), Miss)
        raw = redis.asyncio.Redis.from_url(valkey.url)
        await raw.set(f"keepgate:entry:{yours.id}", encode_entry(answer_to(one, mine)))
        await raw.aclose()
        assert isinstance(await other.lookup(yours), Failed)
        assert isinstance(await other.lookup(yours), Miss)


async def test_a_hit_has_its_age_and_whether_it_is_stale() -> None:
    """An entry past its lifetime is a stale hit until the time for stale entries ends."""
    now = 1000.0
    cache = ExactCache(MemoryStore(2**20, lambda: now), None, keep_stale=30, clock=lambda: now)
    key = key_of(1)
    await cache.store(answer_to(cache, key, created=1000.0, fresh_for=10.0))
    for age, stale in ((0.0, False), (9.9, False), (10.0, True), (39.0, True)):
        now = 1000.0 + age
        found = await cache.lookup(key)
        assert isinstance(found, Hit)
        assert (round(found.age, 6), found.stale) == (age, stale)
    now = 1040.1
    assert isinstance(await cache.lookup(key), Miss)


async def test_the_time_that_an_entry_spent_in_redis_counts() -> None:
    """An entry that comes to memory late does not get its whole lifetime again."""
    now = 1000.0
    memory = MemoryStore(2**20, lambda: now)
    cache = ExactCache(memory, None, keep_stale=0, clock=lambda: now)
    key = key_of(1)
    now = 1008.0
    await cache.store(answer_to(cache, key, created=1000.0, fresh_for=10.0))
    now = 1009.0
    assert isinstance(await cache.lookup(key), Hit)
    now = 1010.5
    assert isinstance(await cache.lookup(key), Miss)


async def test_without_redis_an_unknown_answer_is_a_miss() -> None:
    """An unknown key is a miss of the memory tier where there is no Redis."""
    cache = ExactCache(MemoryStore(2**20), None, keep_stale=0)
    assert await cache.lookup(key_of(1)) == Miss(("memory",))


async def test_a_failure_is_never_a_miss(own_valkey: Valkey) -> None:
    """While Redis does not answer, the lookup of an unknown key is Failed, and memory still gives hits."""
    known, unknown = key_of(1), key_of(2)
    async with worker(own_valkey.url, DEADLINE) as cache:
        await written(cache, answer_to(cache, known))
        assert isinstance(await cache.lookup(unknown), Miss)
        own_valkey.freeze()
        for _ in range(3):
            assert isinstance(await cache.lookup(unknown), Failed)
            assert await tier_of(cache, known) == "memory"
        await own_valkey.kill()
        assert isinstance(await cache.lookup(unknown), Failed)
        await own_valkey.start()

        async def well() -> bool:
            return isinstance(await cache.lookup(unknown), Miss)

        await until(well, within=15)


async def test_redis_is_not_read_before_the_purges_are_known(late_valkey: Valkey) -> None:
    """A worker that starts without Redis fails its lookups until it has read the purges."""
    async with worker(late_valkey.url, DEADLINE) as cache:
        outcome = await cache.lookup(key_of(1))
        assert isinstance(outcome, Failed)
        with pytest.raises(StoreUnavailable):
            await cache.entry("public.aa")
        await late_valkey.start()

        async def well() -> bool:
            return isinstance(await cache.lookup(key_of(1)), Miss)

        await until(well, within=15)


async def test_a_corrupt_value_is_a_failure_then_a_miss(valkey: Valkey) -> None:
    """The lookup of a corrupt value is Failed once and then a miss."""
    key = key_of(1)
    raw = redis.asyncio.Redis.from_url(valkey.url)
    async with worker(valkey.url) as cache:
        await raw.set(f"keepgate:entry:{key.id}", b"KGE1 nonsense")
        assert isinstance(await cache.lookup(key), Failed)
        assert isinstance(await cache.lookup(key), Miss)
    await raw.aclose()


async def test_an_entry_is_shown_and_deleted_by_its_id(valkey: Valkey) -> None:
    """An entry is read and deleted by its id in every tier, and is not found after a purge."""
    key = key_of(1)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        kept = answer_to(one, key)
        await written(one, kept)
        assert await one.entry(key.id) == await other.entry(key.id) == kept
        assert await other.delete(key.id) is True
        assert await other.delete(key.id) is False
        assert await other.entry(key.id) is None
        await written(one, kept)
        await other.purge("all")
        assert await other.entry(key.id) is None


async def test_a_deletion_reaches_the_memory_of_other_workers(valkey: Valkey) -> None:
    """A deletion removes one entry from the memory of other workers at once."""
    gone, stays = key_of(1), key_of(2)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        for key in (gone, stays):
            await written(one, answer_to(one, key))
            assert await tier_of(other, key) == "redis"
            assert await tier_of(other, key) == "memory"
        assert await one.delete(gone.id) is True

        async def seen() -> bool:
            return isinstance(await other.lookup(gone), Miss)

        await until(seen, within=1.8)
        assert isinstance(await one.lookup(gone), Miss)
        assert await tier_of(other, stays) == "memory"


async def test_an_entry_that_is_inspected_is_waited_for(valkey: Valkey, raw: redis.asyncio.Redis) -> None:
    """A Redis that is too slow for a lookup is not too slow for who asks for one entry, or deletes it."""
    key = key_of(1)
    async with worker(valkey.url, deadline=0.05) as one, worker(valkey.url, deadline=0.05) as other:
        kept = answer_to(one, key)
        await written(one, kept)
        await raw.client_pause(300)
        assert await other.entry(key.id) == kept
        await raw.client_pause(300)
        assert await other.delete(key.id)


async def test_a_lookup_under_way_does_not_bring_a_deleted_entry_back(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply from Redis that was on its way during a deletion is not kept in memory."""
    key = key_of(1)
    async with worker(valkey.url) as one, worker(valkey.url) as other:
        await written(one, answer_to(one, key))
        assert other.redis
        replied, deleted = asyncio.Event(), asyncio.Event()
        ask = RedisStore.get

        async def slow(store: RedisStore, entry_id: str) -> Entry | None:
            reply = await ask(store, entry_id)
            replied.set()
            await deleted.wait()
            return reply

        with monkeypatch.context() as patched:
            patched.setattr(RedisStore, "get", slow)
            lookup = asyncio.create_task(other.lookup(key))
            await replied.wait()
            await other.delete(key.id)
            deleted.set()
            await lookup
        assert isinstance(await other.lookup(key), Miss)
