"""The index in a real Redis: what stays there, what is found out, and what a failing Redis does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cache.entries.entry import encode_entry
from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.index.entry_index import EntryFilter
from cache.index.redis_index import RedisIndex
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore, open_redis_store
from tests.cache.entries.entry_examples import entry
from tests.cache.index.test_index_contract import all_ids, flushed, ids, store
from tests.cache.valkey import Valkey
from tests.waiting import until


@asynccontextmanager
async def cache_in(redis: RedisStore) -> AsyncIterator[ExactCache]:
    cache = ExactCache(MemoryStore(2**24), redis, keep_stale=60)
    await cache.sync_purges()
    yield cache


def index_of(cache: ExactCache) -> RedisIndex:
    assert isinstance(cache.index, RedisIndex)
    return cache.index


async def members(raw: Any) -> set[str]:
    """Everything that the index has of entries."""
    found = set()
    for name in await raw.keys("keepgate:index:*"):
        if await raw.type(name) == b"zset":
            found |= {member.decode() for member in await raw.zrange(name, 0, -1)}
    return found


async def test_an_erased_tenant_leaves_nothing_in_the_index(redis_store: RedisStore, raw: Any) -> None:
    """Neither a set of its own nor a member of another one."""
    async with cache_in(redis_store) as cache:
        for namespace in ("gone", "stays"):
            for number in range(3):
                kept = await store(cache, f"{namespace}.{number:032x}", question="What?")
                cache.index.hit(kept.id)
        await flushed(cache)
        await cache.erase("gone")
        names = b" ".join(await raw.keys("*"))
        assert b"gone" not in names
        assert b"stays" in names
        assert not [member for member in await members(raw) if "gone" in member]


async def test_the_sweep_finds_what_has_expired(redis_store: RedisStore, raw: Any) -> None:
    """An entry that Redis no longer has is out of every set after a round, with the names of sets that are empty."""
    async with cache_in(redis_store) as cache:
        for number in range(4):
            cache.index.hit((await store(cache, ids(number)[0], f"m{number}", question="What?")).id)
        await flushed(cache)
        for number in (0, 1, 3):
            await raw.unlink(f"keepgate:entry:{ids(number)[0]}")
        await index_of(cache).sweep(pause=0)
        left = ids(2)[0]
        assert {member.rpartition(".")[2] for member in await members(raw)} == {left.partition(".")[2]}
        assert await raw.smembers("keepgate:index:models") == {b"m2"}
        await raw.unlink(f"keepgate:entry:{left}")
        await index_of(cache).sweep(pause=0)
        assert await raw.keys("keepgate:index:*") in ([], [b"keepgate:index:sweeper"])


async def test_a_page_forgets_what_it_does_not_find(redis_store: RedisStore, raw: Any) -> None:
    """An entry that was evicted is looked for once."""
    async with cache_in(redis_store) as cache:
        for number in range(3):
            await store(cache, ids(number)[0])
        await flushed(cache)
        await raw.unlink(f"keepgate:entry:{ids(1)[0]}")
        assert len(await all_ids(cache, EntryFilter())) == 3
        assert len(await cache.entries(await all_ids(cache, EntryFilter()))) == 2
        assert len(await all_ids(cache, EntryFilter())) == 2


async def test_one_process_sweeps(redis_store: RedisStore) -> None:
    """Of two, until its time is over."""
    one, two = RedisIndex(redis_store), RedisIndex(redis_store)
    assert [await each._is_sweeper() for each in (one, two, one)] == [True, False, True]


async def test_nothing_is_lost_while_redis_is_away(own_valkey: Valkey) -> None:
    """What was stored and served in an outage is in the index after it."""
    async with open_redis_store(own_valkey.url, 1.0) as redis, cache_in(redis) as cache:
        own_valkey.freeze()
        kept = await store(cache, ids(1)[0])
        cache.index.hit(kept.id)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await cache.index.flush()
        own_valkey.thaw()
        await redis.breaker.wait_closed()
        await flushed(cache)
        assert await all_ids(cache, EntryFilter(hottest=True)) == [kept.id]
        assert await all_ids(cache, EntryFilter(model="m")) == [kept.id]


async def test_the_index_is_written_while_the_gateway_runs(redis_store: RedisStore) -> None:
    """A second after an answer was stored everybody can see it."""
    async with cache_in(redis_store) as cache, cache_in(redis_store) as other:
        keeping = asyncio.create_task(cache.keep_index())
        kept = await store(cache, ids(1)[0])
        await redis_store.flush()

        async def is_listed() -> bool:
            return await all_ids(other, EntryFilter()) == [kept.id]

        await until(is_listed)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping


async def test_bytes_that_are_no_entry_are_passed_over(redis_store: RedisStore, raw: Any) -> None:
    """A listing goes on where one entry is damaged, or is another one's."""
    async with cache_in(redis_store) as cache:
        for number in range(3):
            await store(cache, ids(number)[0])
        await flushed(cache)
        await raw.set(f"keepgate:entry:{ids(0)[0]}", b"damaged")
        await raw.set(f"keepgate:entry:{ids(1)[0]}", encode_entry(entry("b.another")))
        found = await cache.entries(await all_ids(cache, EntryFilter()))
        assert [each.id for each in found] == ids(2)
