"""Sums of what became of requests, over minutes, hours and all time."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from cache.stores.redis_store import RedisStore, open_redis_store
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.statistics import ALL, COUNTERS, Statistics, _percentiles, open_statistics
from tests.cache.valkey import Valkey
from tests.clock import Clock
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage

STATS = "/v1/cache/stats"
NOW = 1_800_000_030.0
"""Half a minute after the begin of a minute."""


@pytest.fixture
async def store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with open_redis_store(valkey.url, 2.0) as opened:
        yield opened


def record(**fields: Any) -> RequestRecord:
    known = {"family": "chat.completions", "model": "m", "namespace": "ns", "first_byte_at": 1.0, **fields}
    return RequestRecord("id", "POST", "/v1/chat/completions", began=0.75, ended=2.0, **known)


MISS = record(cache="miss", prompt_tokens=10, completion_tokens=5, cost=0.5, saving=0.0)
HIT = record(
    cache="hit", layer="exact", prompt_tokens=10, completion_tokens=5, cost=0.0, saving=0.25, saved_seconds=1.5
)


async def of(statistics: Statistics, window: str, *names: str) -> dict[str, int]:
    """The sums of a window that are not 0."""
    counts = (await statistics.window(window)).get(names or ALL, [0] * len(COUNTERS))
    return {name: count for name, count in zip(COUNTERS, counts, strict=True) if count}


@pytest.mark.parametrize("shared", [False, True], ids=["memory", "redis"])
async def test_requests_are_counted_by_what_became_of_them(store: RedisStore, shared: bool) -> None:
    """In all, and by model, key and namespace; money in nano-dollars."""
    statistics = Statistics(store if shared else None, 86_400, Clock(NOW))
    outcomes = [
        (MISS, "computed"),
        (HIT, "exact"),
        (record(cache="hit", layer="semantic"), "semantic"),
        (record(cache="miss", layer="flight"), "shared"),
        (record(cache="bypass"), "bypasses"),
        (record(cache="failed"), "failures"),
        (record(error="upstream_unreachable"), "errors"),
        (record(cache="miss", model="other", key="key_1", namespace="theirs"), "computed"),
    ]
    for each, _ in outcomes:
        statistics.count(each)
    found = await of(statistics, "1m")
    assert found.pop("requests") == len(outcomes)
    assert (found.pop("cost"), found.pop("saving"), found.pop("saved_ms")) == (500_000_000, 250_000_000, 1500)
    assert (found.pop("prompt_tokens"), found.pop("completion_tokens")) == (10, 5)
    assert (found.pop("saved_prompt_tokens"), found.pop("saved_completion_tokens")) == (10, 5)
    assert found.pop("unpriced") == 5
    assert found == {name: sum(name == other for _, other in outcomes) for _, name in outcomes}
    for window in ("5m", "1h", "all"):
        assert (await of(statistics, window))["requests"] == len(outcomes)
    assert await of(statistics, "1m", "model", "other") == {"requests": 1, "computed": 1, "unpriced": 1}
    assert await of(statistics, "all", "key", "key_1") == {"requests": 1, "computed": 1, "unpriced": 1}
    assert (await of(statistics, "1h", "namespace", "ns"))["requests"] == len(outcomes) - 1


async def test_what_costs_nothing_is_not_without_a_price() -> None:
    """An answer that was refused, and one that has its cost."""
    statistics = Statistics(None, 86_400, Clock(NOW))
    unpriced = record(cache="hit", layer="exact", status=200)
    for each in (MISS, HIT, record(cache="miss", status=502), record(status=429), unpriced):
        statistics.count(each)
    assert (await of(statistics, "1h"))["unpriced"] == 1


async def test_a_window_slides(store: RedisStore) -> None:
    """The oldest minute counts for the part of it that lies in the window; hours and all time keep everything."""
    clock = Clock(NOW)
    statistics = Statistics(store, 86_400, clock)
    for _ in range(100):
        statistics.count(HIT)
    await of(statistics, "1m")
    clock.now += 60  # of the minute of the requests, half lies in the last sixty seconds
    assert (await of(statistics, "1m"))["requests"] == 50
    assert (await of(statistics, "5m"))["requests"] == 100
    clock.now += 60
    assert await of(statistics, "1m") == {}
    clock.now += 3600
    assert await of(statistics, "1h") == {}
    assert (await of(statistics, "all"))["requests"] == 100


async def test_processes_add_up_and_a_restart_loses_nothing(store: RedisStore) -> None:
    """Statistics of all processes that share a Redis are one."""
    for _ in range(2):
        async with open_statistics(store, 86_400) as statistics:
            statistics.count(MISS)
    async with open_statistics(store, 86_400) as statistics:
        assert (await of(statistics, "all"))["computed"] == 2
        (last,) = (await statistics.timeline(0, 0, 60))[:1]
        assert last == (0, {})


async def test_names_are_bounded() -> None:
    """Names that clients invent end up as other, and no request is missed."""
    statistics = Statistics(None, 86_400, Clock(NOW))
    for number in range(600):
        statistics.count(record(cache="miss", model=f"model {number}"))
    found = await statistics.window("1h")
    models = {names[1]: counts[0] for names, counts in found.items() if names[0] == "model"}
    assert (len(models), models["other"], sum(models.values())) == (501, 100, 600)


async def test_the_timeline_has_each_minute() -> None:
    """The oldest first, minutes without requests as well."""
    clock = Clock(NOW)
    statistics = Statistics(None, 86_400, clock)
    statistics.count(HIT)
    statistics.collect()
    clock.now += 120
    statistics.count(MISS)
    minute = int(clock.now) // 60
    found = await statistics.timeline(minute - 2, minute, 60)
    assert [(begun, totals.get(ALL, [0])[0]) for begun, totals in found] == [
        ((minute - 2) * 60, 1),
        ((minute - 1) * 60, 0),
        (minute * 60, 1),
    ]


async def test_durations_are_percentiles() -> None:
    """Of the time to the first byte and between tokens of streams, by hit and miss."""
    statistics = Statistics(None, 86_400, Clock(NOW))
    for number in range(100):
        statistics.count(record(cache="hit", layer="exact", first_byte_at=0.75 + number / 1e5))
    streamed = record(cache="miss", stream=True, completion_tokens=11, first_byte_at=1.75)
    statistics.count(streamed)
    found = await statistics.durations("1m")
    hits = found["first_byte", "hit"]
    assert hits.p50 is not None
    assert 0.0004 < hits.p50 < 0.0006
    assert hits.p99 is not None
    assert 0.0009 < hits.p99 <= 0.001
    between = found["token", "miss"]
    assert between.p50 is not None
    assert 0.02 <= between.p50 <= 0.05  # 25 ms, read from its class
    assert found["first_byte", "miss"].p50 == pytest.approx(1.0, abs=0.5)


def test_percentiles_of_nothing_and_of_what_is_beyond_all_classes() -> None:
    """None, and the highest bound."""
    assert _percentiles([0] * 20).p50 is None
    assert _percentiles([0] * 19 + [3]).p99 == 100.0


async def figures(client: Client, query: str = "") -> dict[str, Any]:
    answer = await client.get(f"{STATS}?{query}")
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


async def test_stats_have_windows_and_rows(stage: Stage, valkey: Valkey) -> None:
    """What two gateways did is one figure, by model too; ages and sizes are those of the entries."""
    upstream = await stage.mock(models=("mock", "other"))
    one, two = [await stage.gateway(upstream, redis=valkey.url) for _ in range(2)]
    await one.post(chat("a"))
    await one.post(chat("b", model="other"))
    for stream in (False, True):
        assert (await two.post(chat("a", stream=stream))).cache == "hit"
    await two.post(chat("c"), Cache_Control="no-store")
    await figures(one)  # writes what this process has
    found = await figures(two, "by=model&window=5m")
    for window in found["windows"].values():
        assert (window["requests"], window["hits"], window["computed"], window["bypasses"]) == (5, 2, 2, 1)
        assert window["hit_rate"] == 0.5
        assert window["layers"]["exact"] == {"hits": 2, "hit_rate": 0.5}
        assert 0 < window["first_byte"]["hit"]["p50"] < 20
        assert window["saved"]["completion_tokens"] == 2
    assert [(row["name"], row["requests"], row["hits"]) for row in found["by"]["data"]] == [
        ("mock", 4, 2),
        ("other", 1, 0),
    ]
    (timeline,) = (await two.get("/v1/cache/timeline?step=1h&steps=1&by=namespace")).json["data"]
    assert timeline["requests"] == 5
    assert [row["name"] for row in timeline["by"]] == ["public"]


async def test_ages_and_sizes_are_shown(stage: Stage, valkey: Valkey) -> None:
    """Of the entries that there are."""
    client = await stage.gateway(await stage.mock(), redis=valkey.url)
    await client.post(chat("a"))
    await client.get("/v1/cache/entries")  # writes the index
    found = await figures(client)
    assert [each["entries"] for each in found["ages"]] == [1, 0, 0, 0, 0, 0, 0]
    assert sum(each["share"] for each in found["sizes"]) == 1.0


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (f"{STATS}?by=layer", "by"),
        (f"{STATS}?window=2m", "window"),
        (f"{STATS}?since=1h", "since"),
        ("/v1/cache/timeline?step=1d", "step"),
        ("/v1/cache/timeline?steps=0", "steps"),
        ("/v1/cache/timeline?steps=-1", "steps"),
        ("/v1/cache/timeline?by=x", "by"),
        ("/v1/cache/timeline?window=1h", "window"),
    ],
)
async def test_a_bad_query_names_its_field(stage: Stage, query: str, field: str) -> None:
    """With what would be right."""
    client = await stage.gateway(await stage.mock())
    answer = await client.get(query)
    assert answer.status == 400
    assert answer.error["param"] == field


async def test_the_last_requests_are_listed(stage: Stage, valkey: Valkey) -> None:
    """Of all gateways that share the Redis, the newest first, filtered, and without any text of them."""
    upstream = await stage.mock(models=("mock", "other"))
    one, two = [await stage.gateway(upstream, redis=valkey.url) for _ in range(2)]
    await one.post(chat("a secret"))
    await two.get("/v1/requests")
    await two.post(chat("a secret", stream=True))
    await two.post(chat("b", model="other"), Cache_Control="no-store")
    await one.get("/v1/requests")
    answer = await two.get("/v1/requests")
    data = answer.json["data"]
    assert [(each["model"], each.get("cache"), each.get("layer")) for each in data] == [
        ("other", "bypass", None),
        ("mock", "hit", "exact"),
        ("mock", "miss", None),
    ]
    assert all(0 < each["first_byte"] <= each["seconds"] < 20 for each in data)
    assert all(each["status"] == 200 and each["namespace"] == "public" for each in data)
    assert b"secret" not in answer.body
    assert [each["cache"] for each in (await two.get("/v1/requests?cache=hit&limit=5")).json["data"]] == ["hit"]
    assert len((await two.get("/v1/requests?limit=2")).json["data"]) == 2


@pytest.mark.parametrize(("query", "field"), [("limit=0", "limit"), ("limit=x", "limit"), ("status=200", "status")])
async def test_a_bad_query_of_requests_names_its_field(stage: Stage, query: str, field: str) -> None:
    """With what would be right; without Redis there is a list as well."""
    client = await stage.gateway(await stage.mock())
    answer = await client.get(f"/v1/requests?{query}")
    assert (answer.status, answer.error["param"]) == (400, field)
    await client.post(chat("a"))
    assert [each["cache"] for each in (await client.get("/v1/requests")).json["data"]] == ["miss"]
