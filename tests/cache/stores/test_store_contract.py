"""What every store promises, asked of every store."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator

import pytest

from cache.stores.encryption import encryption_with
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore, open_redis_store
from cache.stores.store import Store
from tests.cache.conftest import PATIENT
from tests.cache.entries.entry_examples import entry
from tests.cache.valkey import Valkey
from tests.cache.valkey_cluster import ValkeyCluster, ValkeySentinels
from tests.waiting import until


class FlushedRedisStore(RedisStore):
    """Every write has arrived before anything is asked of the store."""

    async def get(self, entry_id: str):  # type: ignore[no-untyped-def]
        await self.flush()
        return await super().get(entry_id)


SERVERS = {
    "redis": "shared_valkey",
    "redis after its writes": "shared_valkey",
    "encrypted": "shared_valkey",
    "sentinels": "shared_sentinels",
    "cluster": "shared_cluster",
}


@pytest.fixture(params=["memory", *SERVERS], scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def server(kind: str, request: pytest.FixtureRequest) -> Valkey | ValkeyCluster | ValkeySentinels | None:
    """What a store is in; started before any event loop of a test."""
    return request.getfixturevalue(SERVERS[kind]) if kind in SERVERS else None


@pytest.fixture
async def store(kind: str, server: Valkey | ValkeyCluster | ValkeySentinels | None) -> AsyncIterator[Store]:
    if server is None:
        yield MemoryStore(256 * 2**20)
        return
    await server.flush()
    encryption = encryption_with([base64.b64encode(bytes(32)).decode()] if kind == "encrypted" else [])
    async with open_redis_store(server.url, PATIENT, encryption) as opened:
        if kind != "redis":
            opened.__class__ = FlushedRedisStore
        yield opened


async def is_missing(store: Store) -> bool:
    return await store.get("public.aa") is None


async def test_an_entry_comes_back_as_it_was(store: Store) -> None:
    """An entry that was put is returned with every field equal."""
    kept = entry(body=b'{"a":1}', model="modèle", seconds=1.5, has_usage=False)
    await store.put(kept, 60)
    assert await store.get(kept.id) == kept


async def test_an_unknown_id_is_not_found(store: Store) -> None:
    """An unknown id gives None, and deleting it gives False."""
    assert await store.get("public.unknown") is None
    assert await store.delete("public.unknown") is False


async def test_similar_ids_are_different_entries(store: Store) -> None:
    """Ids that share a beginning or differ in the namespace are different entries."""
    ids = ["a.1", "a.1.1", "a.11", "b.1"]
    for number, entry_id in enumerate(ids):
        await store.put(entry(entry_id, prompt_tokens=number), 60)
    for number, entry_id in enumerate(ids):
        found = await store.get(entry_id)
        assert found is not None
        assert (found.id, found.prompt_tokens) == (entry_id, number)


async def test_a_put_replaces_an_older_entry(store: Store) -> None:
    """The last of several entries with one id is returned."""
    for number in range(5):
        await store.put(entry(body=b"%d" % number), 60)
    found = await store.get("public.aa")
    assert found is not None
    assert found.body == b"4"


async def test_a_delete_removes_one_entry(store: Store) -> None:
    """A delete removes one entry and returns whether it was there."""
    await store.put(entry("public.aa"), 60)
    await store.put(entry("public.bb"), 60)
    assert await store.delete("public.aa") is True
    assert await store.get("public.aa") is None
    assert await store.get("public.bb") is not None
    assert await store.delete("public.aa") is False


async def test_a_deleted_entry_can_be_put_again(store: Store) -> None:
    """An entry that is put after the deletion of its id is found."""
    await store.put(entry(body=b"old"), 60)
    await store.delete("public.aa")
    await store.put(entry(body=b"new"), 60)
    found = await store.get("public.aa")
    assert found is not None
    assert found.body == b"new"


@pytest.mark.parametrize("keep_for", [0, 0.0, -1.0])
async def test_an_entry_kept_for_zero_seconds_is_not_found(store: Store, keep_for: float) -> None:
    """A lifetime of zero or less keeps nothing."""
    await store.put(entry(), keep_for)
    assert await store.get("public.aa") is None


async def test_an_entry_kept_for_zero_seconds_removes_an_older_one(store: Store) -> None:
    """An entry with a lifetime of zero removes the older entry of its id."""
    await store.put(entry(body=b"old"), 60)
    assert await store.get("public.aa") is not None
    await store.put(entry(body=b"new"), 0)
    assert await store.get("public.aa") is None


async def test_an_entry_expires_after_its_lifetime(store: Store) -> None:
    """An entry is found before its lifetime ends and not after it."""
    begun = time.monotonic()
    await store.put(entry(), 0.3)
    found = await store.get("public.aa")
    assert found is not None or time.monotonic() - begun > 0.25
    await until(lambda: is_missing(store))
    assert time.monotonic() - begun >= 0.29


@pytest.mark.parametrize("keep_for", [1e-9, 1e-4])
async def test_a_lifetime_below_a_millisecond_is_accepted(store: Store, keep_for: float) -> None:
    """An entry with a lifetime below a millisecond is accepted and expires."""
    await store.put(entry(), keep_for)
    await until(lambda: is_missing(store))


@pytest.mark.parametrize("keep_for", [1e12, 1e300, float("inf")])
async def test_an_endless_lifetime_is_accepted(store: Store, keep_for: float) -> None:
    """An entry with an endless lifetime is accepted and does not stop the writes that follow."""
    await store.put(entry("public.aa"), keep_for)
    await store.put(entry("public.bb"), 60)
    assert await store.get("public.aa") is not None
    assert await store.get("public.bb") is not None


async def test_a_large_entry_comes_back_whole(store: Store) -> None:
    """An entry with a body of one megabyte is returned whole."""
    kept = entry(body=bytes(range(256)) * 2**12)
    await store.put(kept, 60)
    assert await store.get(kept.id) == kept


async def test_a_body_of_any_bytes_comes_back(store: Store) -> None:
    """A body of arbitrary bytes is returned unchanged."""
    kept = entry(body=b"\x00\r\n$-1\r\n\xff\xfe" + bytes(range(256)), proof=bytes(range(16)))
    await store.put(kept, 60)
    assert await store.get(kept.id) == kept


async def test_concurrent_writers_and_readers_do_not_affect_each_other(store: Store) -> None:
    """A hundred concurrent writers and readers each see their own entries."""

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
