"""What every store promises, asked of every store."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore, open_redis_store
from cache.stores.store import Store
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry, until
from tests.cache.valkey import Valkey


class FlushedRedisStore(RedisStore):
    """Every write has arrived before anything is asked of the store."""

    async def get(self, entry_id: str):  # type: ignore[no-untyped-def]
        await self.flush()
        return await super().get(entry_id)


@pytest.fixture(params=["memory", "redis", "redis after its writes"])
async def store(request: pytest.FixtureRequest, valkey: Valkey) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(256 * 2**20)
        return
    async with open_redis_store(valkey.url, PATIENT) as opened:
        if request.param != "redis":
            opened.__class__ = FlushedRedisStore
        yield opened


async def test_an_entry_comes_back_as_it_was(store: Store) -> None:
    """What was put is what is got, field for field."""
    kept = entry(body=b'{"a":1}', model="modèle", seconds=1.5, has_usage=False)
    await store.put(kept, 60)
    assert await store.get(kept.id) == kept


async def test_what_was_never_put_is_not_there(store: Store) -> None:
    """An unknown id is None, and deleting it says so."""
    assert await store.get("public.unknown") is None
    assert await store.delete("public.unknown") is False


async def test_ids_are_told_apart(store: Store) -> None:
    """An id that begins with another, or stands in another namespace, is another entry."""
    ids = ["a.1", "a.1.1", "a.11", "b.1"]
    for number, entry_id in enumerate(ids):
        await store.put(entry(entry_id, prompt_tokens=number), 60)
    for number, entry_id in enumerate(ids):
        found = await store.get(entry_id)
        assert found is not None
        assert (found.id, found.prompt_tokens) == (entry_id, number)


async def test_a_newer_entry_takes_the_place_of_an_older(store: Store) -> None:
    """The last put wins."""
    for number in range(5):
        await store.put(entry(body=b"%d" % number), 60)
    found = await store.get("public.aa")
    assert found is not None
    assert found.body == b"4"


async def test_a_deleted_entry_is_gone_and_only_it(store: Store) -> None:
    """Delete forgets one entry and says that it was there."""
    await store.put(entry("public.aa"), 60)
    await store.put(entry("public.bb"), 60)
    assert await store.delete("public.aa") is True
    assert await store.get("public.aa") is None
    assert await store.get("public.bb") is not None
    assert await store.delete("public.aa") is False


async def test_a_deleted_entry_can_be_put_again(store: Store) -> None:
    """Deletion is of what was there, not of what comes."""
    await store.put(entry(body=b"old"), 60)
    await store.delete("public.aa")
    await store.put(entry(body=b"new"), 60)
    found = await store.get("public.aa")
    assert found is not None
    assert found.body == b"new"


@pytest.mark.parametrize("keep_for", [0, 0.0, -1.0])
async def test_zero_seconds_keep_nothing(store: Store, keep_for: float) -> None:
    """A lifetime of zero can be said, and means that nothing is kept."""
    await store.put(entry(), keep_for)
    assert await store.get("public.aa") is None


async def test_zero_seconds_end_an_older_entry(store: Store) -> None:
    """The newer entry takes the older one's place even where nothing of it is kept."""
    await store.put(entry(body=b"old"), 60)
    assert await store.get("public.aa") is not None
    await store.put(entry(body=b"new"), 0)
    assert await store.get("public.aa") is None


async def test_an_entry_ends_with_its_time(store: Store) -> None:
    """An entry is there before its time is over and gone after it."""
    begun = time.monotonic()
    await store.put(entry(), 0.3)
    found = await store.get("public.aa")
    assert found is not None or time.monotonic() - begun > 0.25

    async def gone() -> bool:
        return await store.get("public.aa") is None

    await until(gone)
    assert time.monotonic() - begun >= 0.29


@pytest.mark.parametrize("keep_for", [1e-9, 1e-4])
async def test_the_shortest_time_is_a_time(store: Store, keep_for: float) -> None:
    """A lifetime far below a millisecond is no error."""
    await store.put(entry(), keep_for)

    async def gone() -> bool:
        return await store.get("public.aa") is None

    await until(gone)


@pytest.mark.parametrize("keep_for", [1e12, 1e300, float("inf")])
async def test_the_longest_time_is_a_time(store: Store, keep_for: float) -> None:
    """For ever is no error either, and does not stop the writes that follow."""
    await store.put(entry("public.aa"), keep_for)
    await store.put(entry("public.bb"), 60)
    assert await store.get("public.aa") is not None
    assert await store.get("public.bb") is not None


async def test_a_large_entry_comes_back_whole(store: Store) -> None:
    """A megabyte of answer is one entry."""
    kept = entry(body=bytes(range(256)) * 2**12)
    await store.put(kept, 60)
    assert await store.get(kept.id) == kept


async def test_bytes_are_only_bytes(store: Store) -> None:
    """No byte of a body means anything to the store."""
    kept = entry(body=b"\x00\r\n$-1\r\n\xff\xfe" + bytes(range(256)), proof=bytes(range(16)))
    await store.put(kept, 60)
    assert await store.get(kept.id) == kept


async def test_many_at_once_do_not_disturb_each_other(store: Store) -> None:
    """A hundred writers and readers at once each see their own entries."""

    async def one(number: int) -> None:
        mine = entry(f"public.{number}", body=b"%d" % number * 100)
        await store.put(mine, 60)
        assert await store.get(mine.id) == mine
        if number % 3 == 0:
            assert await store.delete(mine.id) is True
            assert await store.get(mine.id) is None

    await asyncio.gather(*(one(number) for number in range(100)))
    for number in range(100):
        assert (await store.get(f"public.{number}") is None) == (number % 3 == 0)
