"""Sums that processes share: in one process, and in a real Redis."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore, open_redis_store
from cache.stores.shared_totals import Bucket, Names, SharedTotals, writing_at_the_end
from tests.cache.valkey import Valkey
from tests.clock import Clock

HOUR = Bucket("475000", 7200)


def totals_of(redis: RedisStore | None, title: str, clock: Clock | None = None) -> SharedTotals:
    return SharedTotals(redis, title, ("model", "key"), ("hits", "misses"), folded, clock or Clock())


def folded(names: Names) -> Names:
    return (names[0], "other")


@pytest.fixture
async def store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with open_redis_store(valkey.url, 1.0) as opened:
        yield opened


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_counts_are_added_up(store: RedisStore, shared: bool) -> None:
    """Each bucket has its own sums, by names; one that nothing was added to is empty."""
    totals = totals_of(store if shared else None, f"added-{shared}")
    totals.add(HOUR, ("m", "a"), (1, 0))
    totals.add(HOUR, ("m", "a"), (2, 3))
    totals.add(HOUR, ("m", "b"), (0, 1))
    totals.add(Bucket("ever"), ("m", "a"), (5, 0))
    await totals.flush()
    assert await totals.read_all([HOUR.name, "ever", "never"]) == [
        {("m", "a"): [3, 3], ("m", "b"): [0, 1]},
        {("m", "a"): [5, 0]},
        {},
    ]


async def test_a_bucket_expires_and_one_without_a_time_does_not(store: RedisStore) -> None:
    """In Redis by its time to live; in memory when its time is over."""
    totals = totals_of(store, "expiring")
    for bucket in (HOUR, Bucket("ever")):
        totals.add(bucket, ("m", "a"), (1, 0))
    await totals.flush()
    assert 0 < await store.command(("TTL", f"keepgate:expiring:{HOUR.name}")) <= HOUR.keep
    assert await store.command(("TTL", "keepgate:expiring:ever")) == -1
    clock = Clock()
    alone = totals_of(None, "alone", clock)
    for bucket in (HOUR, Bucket("ever")):
        alone.add(bucket, ("m", "a"), (1, 0))
    clock.now += HOUR.keep + 1
    await alone.flush()
    assert await alone.read_all([HOUR.name, "ever"]) == [{}, {("m", "a"): [1, 0]}]


names = st.text(max_size=20) | st.sampled_from(['"],[', "a:b", "", "\n", "process 1", '["a"]', "hits"])


@given(st.lists(st.tuples(names, names), unique=True, min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_no_name_breaks_the_format(groups: list[tuple[str, str]]) -> None:
    """What a name is made of never changes whose sum it is; what is no sum is passed over."""
    fields: list[bytes] = []
    for number, group in enumerate(groups):
        fields += [json.dumps([*group, "misses"]).encode(), str(number + 1).encode()]
    others = [b"process 0123456789abcdef", b"3", b"[]", b"1", b"\xff", b"1", b'["m","a","b","hits"]', b"1"]
    counted = totals_of(None, "format")._decoded([*fields, *others, b'["m","a","other counter"]', b"1"])
    assert {group: counts[1] for group, counts in counted.items() if any(counts)} == {
        group: number + 1 for number, group in enumerate(groups)
    }


async def test_one_flush_takes_all(store: RedisStore) -> None:
    """More sums than a batch has room for are all in Redis after a flush, each once."""
    totals = totals_of(store, "many")
    for number in range(3000):
        totals.add(HOUR, ("m", str(number)), (1, 2))
    await totals.flush()
    found = await totals_of(store, "many").read(HOUR.name)
    assert len(found) == 3000
    assert all(counts == [1, 2] for counts in found.values())


async def test_a_batch_that_is_sent_again_counts_once(store: RedisStore) -> None:
    """A reply that was lost after Redis had taken the batch doubles nothing."""
    totals = totals_of(store, "again")
    totals.add(HOUR, ("m", "a"), (1, 0))
    batch = totals._next_batch()
    await totals.flush()
    totals._unsent = batch
    totals.add(HOUR, ("m", "a"), (1, 0))
    await totals.flush()
    assert await totals.read(HOUR.name) == {("m", "a"): [2, 0]}


async def test_nothing_is_lost_while_redis_is_away(own_valkey: Valkey) -> None:
    """What is counted while Redis is frozen is there once when it is back."""
    async with open_redis_store(own_valkey.url, 1.0) as store:
        totals = totals_of(store, "away")
        totals.add(HOUR, ("m", "a"), (1, 0))
        own_valkey.freeze()
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await totals.flush()
            totals.add(HOUR, ("m", "a"), (1, 0))
        own_valkey.thaw()
        await store.breaker.wait_closed()
        await totals.flush()
        assert await totals.read(HOUR.name) == {("m", "a"): [3, 0]}


async def test_sums_that_wait_are_bounded() -> None:
    """Beyond the bound they are added under folded names, and none is missed."""
    totals = totals_of(None, "bounded")
    for number in range(60_000):
        totals.add(HOUR, ("m", str(number)), (1, 0))
    found = await totals.read(HOUR.name)
    assert len(found) == 50_001
    assert found["m", "other"] == [10_000, 0]


async def test_the_end_writes_what_is_left(store: RedisStore, raw: Any) -> None:
    """What was counted before the end is in Redis after it."""
    totals = totals_of(store, "ended")
    async with writing_at_the_end(totals, lambda: totals.add(HOUR, ("m", "a"), (1, 0))):
        pass
    assert await raw.exists(f"keepgate:ended:{HOUR.name}")
