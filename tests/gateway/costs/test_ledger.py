"""Totals of costs: in one process, and in a real Redis."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore, open_redis_store
from gateway import metrics
from gateway.costs.ledger import COUNTERS, Group, Ledger, open_ledger
from gateway.costs.pricing import Charge
from gateway.costs.report import InvalidPeriod, read_time, report
from tests.cache.entries.entry_examples import entry
from tests.cache.valkey import Valkey
from tests.clock import Clock

KEEP = 10 * 86_400.0
NOW = 1_800_000_000.0
HOUR = int(NOW) // 3600
ENTRY = entry(model="m", upstream="u", repeat_cost=0.25, prompt_tokens=10, completion_tokens=5, cached_tokens=2)
MISS = Charge("m", "u", prompt_tokens=10, completion_tokens=5, cost=0.5, repeat_cost=0.25)


@pytest.fixture
async def store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with open_redis_store(valkey.url, 1.0) as opened:
        yield opened


async def totals(ledger: Ledger) -> dict[Group, dict[str, int]]:
    """All totals of every hour, without counters that are 0."""
    found: dict[Group, dict[str, int]] = {}
    async for _, groups in ledger.hours(HOUR - 1000, HOUR + 1000):
        for group, counts in groups.items():
            sums = found.setdefault(group, {})
            for name, count in zip(COUNTERS, counts, strict=True):
                if count:
                    sums[name] = sums.get(name, 0) + count
    return found


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_requests_are_added_up(store: RedisStore, shared: bool) -> None:
    """Misses, hits and joined flights have groups of their own; money is in nano-dollars."""
    ledger = Ledger(store if shared else None, KEEP, Clock(NOW))
    ledger.record(MISS, "key_1", "web")
    ledger.record(MISS.joined(), "key_1", "web")
    for _ in range(3):
        ledger.hit(ENTRY, "exact", "key_1", "web")
    ledger.hit(ENTRY, "semantic", "key_2", "web", saving=0.125)
    await ledger.flush()
    ledger.hit(ENTRY, "exact", "key_1", "web")
    tokens = {"prompt_tokens": 10, "completion_tokens": 5}
    assert await totals(ledger) == {
        Group("key_1", "web", "m", "u", "none"): {"requests": 1, **tokens, "cost": 500_000_000},
        Group("key_1", "web", "m", "u", "flight"): {"requests": 1, **tokens, "saving": 250_000_000},
        Group("key_1", "web", "m", "u", "exact"): {
            **{"requests": 4, "hits": 4, "prompt_tokens": 40, "cached_tokens": 8, "completion_tokens": 20},
            "saving": 1_000_000_000,
        },
        Group("key_2", "web", "m", "u", "semantic"): {
            **{"requests": 1, "hits": 1, "prompt_tokens": 10, "cached_tokens": 2, "completion_tokens": 5},
            "saving": 125_000_000,
        },
    }


async def test_what_has_no_price_is_counted_apart(store: RedisStore) -> None:
    """A request without a known cost, or a hit without a known saving, adds nothing to the money."""
    ledger = Ledger(store, KEEP, Clock(NOW))
    ledger.record(Charge("m", "u"))
    ledger.hit(entry(model="m", upstream="u", repeat_cost=None, prompt_tokens=0, completion_tokens=0), "exact")
    assert await totals(ledger) == {
        Group("", "", "m", "u", "none"): {"requests": 1, "unpriced": 1},
        Group("", "", "m", "u", "exact"): {"requests": 1, "hits": 1, "unpriced": 1},
    }


async def test_processes_add_to_the_same_totals(store: RedisStore) -> None:
    """Ledgers of two processes are one sum, in the hour of each request, and expire with it."""
    clock = Clock(NOW)
    ledgers = [Ledger(store, KEEP, clock) for _ in range(2)]
    for ledger in ledgers:
        ledger.record(MISS)
        await ledger.flush()
    clock.now += 3600
    ledgers[0].record(MISS)
    rows, total = await report(ledgers[0], ["hour"], NOW - 1, clock.now + 1, {})
    assert [(row["hour"], row["requests"]) for row in rows] == [("2027-01-15T08:00Z", 2), ("2027-01-15T09:00Z", 1)]
    assert total["cost"] == 1.5
    assert 0 < await store.command(("TTL", f"keepgate:costs:{HOUR}")) <= KEEP


async def test_nothing_is_lost_while_redis_is_away(own_valkey: Valkey) -> None:
    """Requests are counted while Redis is frozen, and are in Redis once each when it is back."""
    async with open_redis_store(own_valkey.url, 1.0) as store:
        ledger = Ledger(store, KEEP, Clock(NOW))
        ledger.record(MISS)
        own_valkey.freeze()
        with pytest.raises(StoreUnavailable):
            await ledger.flush()
        for _ in range(5):
            ledger.record(MISS)
        with pytest.raises(StoreUnavailable):
            await ledger.flush()
        own_valkey.thaw()
        await store.breaker.wait_closed()
        await ledger.flush()
        assert (await totals(ledger))[Group("", "", "m", "u", "none")]["requests"] == 6


async def test_the_end_writes_what_is_left(store: RedisStore, raw: Any) -> None:
    """A ledger that ends has written what it knew."""
    async with open_ledger(store, KEEP) as ledger:
        ledger.record(MISS)
    assert len(await raw.keys("keepgate:costs:*")) == 1


async def test_groups_are_bounded() -> None:
    """Beyond the bound the names that clients choose are other, and no request is missed."""
    ledger = Ledger(None, KEEP, Clock(NOW))
    for number in range(6000):
        ledger.record(Charge(f"model {number}", "u"), f"key {number}", "web")
    found = await totals(ledger)
    assert len(found) == 5001
    assert found[Group("other", "web", "other", "u", "none")]["requests"] == 1000
    for batch in range(12):
        for number in range(5000):
            ledger.record(Charge(f"model {batch} {number}", "u"))
        ledger.collect()
    found = await totals(ledger)
    assert len(found) <= 50_002
    assert sum(counts["requests"] for counts in found.values()) == 66_000


async def test_old_hours_are_forgotten_without_redis() -> None:
    """Memory keeps what Redis would."""
    clock = Clock(NOW)
    ledger = Ledger(None, 7200, clock)
    ledger.record(MISS)
    ledger.collect()
    clock.now += 4 * 3600
    ledger.record(MISS)
    assert [counts["requests"] for counts in (await totals(ledger)).values()] == [1]


async def test_rows_are_by_what_is_asked_for() -> None:
    """Rows are summed over what is not asked for, filtered, and sorted by money."""
    ledger = Ledger(None, KEEP, Clock(NOW))
    ledger.record(MISS, "key_1", "web")
    ledger.record(Charge("cheap", "u", cost=0.125), "key_1", "web")
    ledger.hit(ENTRY, "exact", "key_2", "ops")
    rows, total = await report(ledger, ["model"], NOW - 3600, NOW + 3600, {})
    assert [(row["model"], row["cost"], row["saving"], row["hits"]) for row in rows] == [
        ("m", 0.5, 0.25, 1),
        ("cheap", 0.125, 0, 0),
    ]
    assert (total["requests"], total["cost"], total["saving"]) == (3, 0.625, 0.25)
    rows, total = await report(ledger, ["key", "day"], NOW - 3600, NOW + 3600, {"team": "web"})
    assert [(row["key"], row["day"]) for row in rows] == [("key_1", "2027-01-15")]
    assert total["requests"] == 2
    assert (await report(ledger, ["model"], NOW - 7200, NOW - 3600, {}))[0] == []


def test_metrics_have_the_money() -> None:
    """Counters by model and layer, and by team."""

    def value(name: str, **labels: str) -> float:
        metrics.flush()
        return metrics.registry.get_sample_value(f"keepgate_{name}_total", labels) or 0.0

    ledger = Ledger(None, KEEP, Clock(NOW))
    before = value("cost_dollars", model="m", layer="none"), value("team_saved_dollars", team="web")
    ledger.record(MISS, "key_1", "web")
    ledger.hit(ENTRY, "exact", "key_1", "web")
    ledger.collect()
    assert value("cost_dollars", model="m", layer="none") == before[0] + 0.5
    assert value("team_saved_dollars", team="web") == before[1] + 0.25


def test_a_label_has_few_values() -> None:
    """The first values stay themselves, later ones are other."""
    label = metrics.BoundedLabel(2)
    assert [label.of(value) for value in "abcab"] == ["a", "b", "other", "a", "b"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("24h", NOW - 86_400),
        ("7d", NOW - 7 * 86_400),
        ("2w", NOW - 14 * 86_400),
        ("2027-01-15", 1_799_971_200.0),
        ("2027-01-15T08:00:00Z", 1_800_000_000.0),
        ("2027-01-15T08:00:00+01:00", 1_799_996_400.0),
    ],
)
def test_a_time_is_read(text: str, seconds: float) -> None:
    """Ages and dates; a date without a zone is of UTC."""
    assert read_time(text, NOW) == seconds


@pytest.mark.parametrize("text", ["", "7", "7m", "d", "-7d", "yesterday", "2027-13-01", "7 d", "1" * 30 + "d"])
def test_another_time_is_refused(text: str) -> None:
    """What is no time raises InvalidPeriod."""
    with pytest.raises(InvalidPeriod):
        read_time(text, NOW)
