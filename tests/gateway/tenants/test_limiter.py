"""Limits of keys and teams: exact over workers, for hits and for misses."""

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

import pytest
import redis.asyncio

from cache.errors import StoreUnavailable
from gateway.errors import BudgetExceeded, CacheUnavailable, RateLimited
from gateway.settings.limits import KeySettings
from gateway.tenants.limiter import Limiter, open_limiter
from gateway.tenants.scope import scopes_of
from gateway.tenants.virtual_key import Limits
from tests.cache.valkey import Valkey
from tests.gateway.tenants.conftest import Workers, caller
from tests.waiting import until

ALICE_SPENT = "keepgate:{limits:key_alice}:key:key_alice:spent"
ALICE_SLOTS = "keepgate:{limits:key_alice}:key:key_alice:slots"
ALICE_RESERVED = "keepgate:{limits:key_alice}:key:key_alice:reserved"


async def admitted(requests: list[Awaitable[Any]]) -> int:
    """How many of the requests were admitted; the others must have been refused by a limit."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        assert not isinstance(result, BaseException) or isinstance(result, RateLimited), result
    return sum(not isinstance(result, BaseException) for result in results)


async def calls(raw: Any, command: str = "evalsha") -> int:
    """How often Redis was sent a command."""
    stats = await raw.info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


# Requests a minute


@pytest.mark.parametrize("kind", ["hits", "misses", "misses with other limits"])
async def test_a_limit_is_exact_over_workers(workers: Workers, valkey: Valkey, kind: str) -> None:
    """Of 1,000 concurrent requests at four workers, as many are admitted as the limit says."""
    limiters = [(await workers.start(valkey)).limiter for _ in range(4)]
    alice = caller(requests_per_minute=100, tokens_per_minute=10**6 if "other" in kind else None)

    def request(limiter: Limiter) -> Awaitable[Any]:
        return limiter.admit_hit(alice) if kind == "hits" else limiter.admit(alice, 5, 5, 0)

    assert await admitted([request(limiters[number % 4]) for number in range(1_000)]) == 100


async def test_a_large_limit_is_exact_though_permits_are_leased(workers: Workers, valkey: Valkey) -> None:
    """Permits that are leased in parts add up to the limit, and most hits ask nobody."""
    limiters = [(await workers.start(valkey)).limiter for _ in range(2)]
    alice = caller(requests_per_minute=5_000)
    served = 0
    asked = 0
    for number in range(12_000):
        limiter = limiters[number % 2]
        taken = limiter.take_hit(alice)
        if taken is None:
            asked += 1
            taken = await admitted([limiter.admit_hit(alice)]) == 1
        served += taken

    assert served == 5_000
    assert asked < 5_000 / 4


async def test_permits_that_nobody_used_come_back(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """What is left of a lease when it ends is returned."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(requests_per_minute=50_000)
    await limiter.admit_hit(alice)
    window = scopes_of(alice.key)[0].keys[0]  # type: ignore[arg-type]
    assert int(await raw.hget(window, "rsum")) == 50
    assert limiter.take_hit(alice) is True
    limiter._usages["key_alice"].permits_until = time.monotonic()
    assert limiter.take_hit(alice) is None

    async def is_returned() -> bool:
        return int(await raw.hget(window, "rsum")) == 2

    await until(is_returned)


async def test_a_refusal_is_remembered(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """A key that is at its limit does not make Redis busy."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(requests_per_minute=1)
    await limiter.admit_hit(alice)
    assert await admitted([limiter.admit_hit(alice)]) == 0
    before = await calls(raw)

    assert limiter.take_hit(alice) is False
    assert await admitted([limiter.admit_hit(alice) for _ in range(500)]) == 0
    assert await calls(raw) - before < 10


async def test_a_raised_limit_holds_at_once(workers: Workers, valkey: Valkey) -> None:
    """What was used stays used, and a remembered refusal ends with the limit that it was about."""
    limiter = (await workers.start(valkey)).limiter
    assert await admitted([limiter.admit_hit(caller(requests_per_minute=5)) for _ in range(9)]) == 5
    assert await admitted([limiter.admit_hit(caller(requests_per_minute=7)) for _ in range(9)]) == 2


async def test_a_refusal_says_what_is_limited(workers: Workers, valkey: Valkey) -> None:
    """The error names scope and limit, and has OpenAI's headers and Retry-After."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(requests_per_minute=3)
    assert await admitted([limiter.admit_hit(alice) for _ in range(3)]) == 3
    with pytest.raises(RateLimited, match="The key 'alice' may have 3 requests a minute") as refused:
        await limiter.admit_hit(alice)

    error = refused.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert 50 < int(error.headers["Retry-After"]) <= 61
    assert error.headers["x-ratelimit-limit-requests"] == "3"
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    assert 50 < float(error.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 61
    usage = limiter._usages["key_alice"]
    usage.refused_at, usage.refused_until = usage.refused_at - 30, usage.refused_until + 30  # as if it were earlier
    with pytest.raises(RateLimited) as remembered:
        await limiter.admit_hit(alice)
    assert 20 < int(remembered.value.headers["Retry-After"]) <= 31


# Keys and teams


async def test_a_team_is_limited_over_its_keys(workers: Workers, valkey: Valkey) -> None:
    """All keys of a team share its limit, and what the team refuses is not taken from the key."""
    limiter = (await workers.start(valkey)).limiter
    shared = Limits(requests_per_minute=10)
    alice = caller("alice", "web", shared, requests_per_minute=8, tokens_per_minute=10**6)
    bob = caller("bob", "web", shared)
    assert await admitted([limiter.admit_hit(bob) for _ in range(6)]) == 6
    assert await admitted([limiter.admit(alice, 1, 1, 0) for _ in range(6)]) == 4
    with pytest.raises(RateLimited, match="The team 'web' may have 10 requests a minute"):
        await limiter.admit(alice, 1, 1, 0)

    alone = caller("alice", "web", Limits(), requests_per_minute=8)
    assert await admitted([limiter.admit_hit(alone) for _ in range(9)]) == 4


async def test_a_key_without_limits_asks_nobody(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """Neither its hits nor its misses reach Redis."""
    limiter = (await workers.start(valkey)).limiter
    before = await calls(raw)
    for _ in range(20):
        assert limiter.take_hit(caller()) is True
        admission = await limiter.admit(caller(), 100, 100, 1.0)
        admission.settle(1, 1.0)
        admission.release()

    assert await calls(raw) - before <= 1  # a heartbeat


# Tokens


async def test_tokens_are_reserved_and_settled(workers: Workers, valkey: Valkey) -> None:
    """An estimate is held until it is known what was used; the rest is free then."""
    worker = await workers.start(valkey)
    alice = caller(tokens_per_minute=100)
    first = await worker.limiter.admit(alice, 10, 80, 0)
    assert first.headers["x-ratelimit-remaining-tokens"] == "10"
    with pytest.raises(RateLimited, match="100 tokens a minute"):
        await worker.limiter.admit(alice, 11, 0, 0)
    first.settle(30, 0)
    first.settle(0, 0)  # only the first counts
    await worker.limiter.flush()

    second = await worker.limiter.admit(alice, 60, 0, 0)
    second.settle(70, 0)
    await worker.limiter.flush()
    with pytest.raises(RateLimited, match="100 tokens a minute"):
        await worker.limiter.admit(alice, 1, 0, 0)


async def test_a_request_larger_than_the_limit_takes_a_whole_minute(workers: Workers, valkey: Valkey) -> None:
    """It is admitted alone, not refused for ever."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(tokens_per_minute=100)
    assert await admitted([limiter.admit(alice, 50, 5_000, 0)]) == 1
    assert await admitted([limiter.admit(alice, 1, 0, 0)]) == 0


# Misses that are leased


FAR: dict[str, Any] = {
    "requests_per_minute": 10**6,
    "tokens_per_minute": 10**8,
    "concurrent_requests": 10**4,
    "budget_per_day": 10.0**4,
}


async def test_most_misses_of_a_busy_key_ask_nobody(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """Far from its limits they are leased; each counts for what it used, and holds nothing once it has ended."""
    worker = await workers.start(valkey)
    alice = caller(**FAR)
    before = await calls(raw)
    for number in range(500):
        with await worker.limiter.admit(alice, 10, 90, 0.001) as admission:
            assert admission.headers["x-ratelimit-remaining-requests"] == str(10**6 - number - 1)
            admission.settle(30, 0.000_5)
    assert worker.limiter._usages["key_alice"].end_lease()
    await worker.limiter.flush()

    assert await calls(raw) - before < 500 / 5
    window = scopes_of(alice.key)[0].keys[0]  # type: ignore[arg-type]
    assert await raw.hmget(window, "rsum", "tsum") == [b"500", b"15000"]
    assert await raw.hget(ALICE_SPENT, "day_sum") == b"250000000"
    assert not await raw.exists(ALICE_SLOTS, ALICE_RESERVED)


async def test_misses_that_nobody_used_come_back(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """What is left of a lease when it ends is returned, and the next one is smaller."""
    worker = await workers.start(valkey)
    alice = caller(**FAR)
    admissions = [await worker.limiter.admit(alice, 10, 90, 0.001) for _ in range(33)]
    lease = worker.limiter._usages["key_alice"].lease
    assert lease is not None
    assert (lease.granted, lease.left) == (32, 30)
    lease.until = time.monotonic()

    async def is_returned() -> bool:
        return int(await raw.zcard(ALICE_SLOTS)) == 33

    await until(is_returned)
    assert await raw.hget(ALICE_SPENT, "day_sum") == b"33000000"
    assert await raw.zcard(ALICE_RESERVED) == 33
    assert worker.limiter._usages["key_alice"].wanted == 2
    for admission in admissions:
        admission.settle(0, 0)
        admission.release()
    await worker.limiter.flush()
    assert not await raw.exists(ALICE_SLOTS, ALICE_RESERVED)


async def test_a_larger_miss_than_was_leased_asks_for_itself(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """It reserves what it may use, and later ones lease so much."""
    worker = await workers.start(valkey)
    alice = caller(**FAR)
    for _ in range(4):
        (await worker.limiter.admit(alice, 10, 0, 0.001)).settle(10, 0.001)
    (await worker.limiter.admit(alice, 5_000, 0, 0.5)).settle(4_000, 0.25)
    worker.limiter._usages["key_alice"].end_lease()
    await worker.limiter.flush()

    window = scopes_of(alice.key)[0].keys[0]  # type: ignore[arg-type]
    assert await raw.hmget(window, "rsum", "tsum") == [b"5", b"4040"]
    assert await raw.hget(ALICE_SPENT, "day_sum") == b"254000000"


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ({"requests_per_minute": 3_000, "tokens_per_minute": 10**9}, 3_000),
        ({"tokens_per_minute": 20_000}, 2_000),
        ({"concurrent_requests": 700}, 700),
        ({"budget_per_day": 1.0}, 1_000),
    ],
)
async def test_leased_misses_add_up_to_the_limit(
    workers: Workers, valkey: Valkey, limits: dict[str, Any], most: int
) -> None:
    """Near the limit each miss asks for itself: all of it is used, and no more, by however many workers."""
    limiters = [(await workers.start(valkey)).limiter for _ in range(3)]
    alice = caller(**limits)
    kept = []
    used_up: set[int] = set()
    for number in range(20 * most):
        if (which := number % 3) in used_up:
            continue
        try:
            kept.append(await limiters[which].admit(alice, 5, 5, 0.001))
        except RateLimited:
            used_up.add(which)

    assert len(kept) == most


async def test_a_large_miss_is_not_refused_for_what_small_ones_had_leased(workers: Workers, valkey: Valkey) -> None:
    """What a process holds itself is given back before a refusal counts."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(budget_per_day=1.0)
    for _ in range(20):
        (await limiter.admit(alice, 1, 1, 0.000_1)).settle(2, 0)
    assert limiter._usages["key_alice"].lease.left  # type: ignore[union-attr]
    await limiter.admit(alice, 1, 1, 0.999_9)


async def test_misses_are_admitted_side_by_side(workers: Workers, own_valkey: Valkey) -> None:
    """While one leases, others do not wait for its reply."""
    limiter = (await workers.start(own_valkey)).limiter
    alice = caller(**FAR)
    (await limiter.admit(alice, 1, 1, 0)).settle(2, 0)
    asked: list[int] = []
    leased = asyncio.Event()
    ask = limiter._ask

    async def counting(usage: Any, wanted: int, miss: Any) -> list[int]:
        asked.append(wanted)
        if wanted == 1:
            await leased.wait()
        reply = await ask(usage, wanted, miss)
        leased.set()
        return reply

    limiter._ask = counting  # type: ignore[method-assign]
    admitting = [asyncio.create_task(limiter.admit(alice, 1, 1, 0)) for _ in range(6)]
    await asyncio.sleep(0)
    assert asked == [2, 1, 1, 1, 1, 1]
    await asyncio.gather(*admitting)
    assert limiter._usages["key_alice"].wanted == 4  # as the lease says, though others were answered later


async def test_an_outage_leaves_few_slots_to_free(workers: Workers, own_valkey: Valkey) -> None:
    """They expire by themselves: what is told of them stays small, however long Redis is away."""
    limiter = (await workers.start(own_valkey)).limiter
    alice = caller(**FAR)
    for _ in range(40):
        (await limiter.admit(alice, 1, 1, 0)).settle(2, 0)
    await own_valkey.kill()
    for _ in range(3_000):
        (await limiter.admit(alice, 1, 1, 0)).release()
    assert len(limiter._usages["key_alice"].batch.freed) <= 1_000


async def test_a_reply_to_limits_that_were_changed_meanwhile_is_given_back(
    workers: Workers, own_valkey: Valkey
) -> None:
    """All but the miss that asked."""
    limiter = (await workers.start(own_valkey)).limiter
    alice = caller(**FAR)
    for _ in range(31):
        (await limiter.admit(alice, 1, 1, 0)).settle(2, 0)
    own_valkey.freeze()
    asking = asyncio.create_task(limiter.admit(alice, 1, 1, 0))
    await asyncio.sleep(0.01)
    assert limiter.take_hit(caller(**FAR | {"concurrent_requests": 500})) is not False
    own_valkey.thaw()
    (await asking).settle(2, 0)
    await limiter.flush()
    window = scopes_of(alice.key)[0].keys[0]  # type: ignore[arg-type]
    raw = redis.asyncio.Redis.from_url(own_valkey.url)
    assert await raw.hget(window, "tsum") == b"64"
    await raw.aclose()


async def test_a_limiter_that_ends_gives_leases_back(valkey: Valkey, workers: Workers, raw: Any) -> None:
    """A restart holds nothing of a limit."""
    worker = await workers.start(valkey)
    alice = caller(**FAR)
    async with open_limiter(worker.redis, KeySettings(required=True)) as limiter:
        for _ in range(20):
            with await limiter.admit(alice, 1, 1, 0.001) as admission:
                admission.settle(2, 0.001)
    window = scopes_of(alice.key)[0].keys[0]  # type: ignore[arg-type]
    assert await raw.hmget(window, "rsum", "tsum") == [b"20", b"40"]
    assert not await raw.exists(ALICE_SLOTS, ALICE_RESERVED)


async def test_a_lease_ends_with_the_limits_it_was_for(workers: Workers, valkey: Valkey) -> None:
    """A lowered limit holds at once."""
    limiter = (await workers.start(valkey)).limiter
    for _ in range(10):
        (await limiter.admit(caller(**FAR), 1, 1, 0)).settle(2, 0)
    assert await admitted([limiter.admit(caller(tokens_per_minute=2), 1, 1, 0) for _ in range(5)]) == 0


# Concurrent requests


async def test_concurrent_requests_are_limited_over_workers(workers: Workers, valkey: Valkey) -> None:
    """A request that ends makes place for one, at whichever worker."""
    limiters = [(await workers.start(valkey)).limiter for _ in range(3)]
    alice = caller(concurrent_requests=4)
    first = await limiters[0].admit(alice, 1, 1, 0)
    assert await admitted([limiters[number % 3].admit(alice, 1, 1, 0) for number in range(50)]) == 3
    first.release()
    first.release()  # only the first counts
    await limiters[0].flush()

    assert await admitted([limiters[1].admit(alice, 1, 1, 0) for _ in range(5)]) == 1


async def test_one_request_after_the_other_is_never_refused(workers: Workers, valkey: Valkey) -> None:
    """A client of one concurrent request may send the next as soon as it has its answer."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(concurrent_requests=1)
    for _ in range(200):
        (await limiter.admit(alice, 1, 1, 0)).release()


async def test_slots_of_a_dead_worker_become_free(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """A slot that is not renewed in time counts no more."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(concurrent_requests=1)
    await limiter.admit(alice, 1, 1, 0)
    (slot,) = await raw.zrange(ALICE_SLOTS, 0, -1, withscores=True)
    seconds, _ = await raw.time()
    assert 13_000 < slot[1] - seconds * 1000 < 17_000
    await raw.zadd(ALICE_SLOTS, {slot[0]: seconds * 1000 - 1})

    assert await admitted([limiter.admit(alice, 1, 1, 0)]) == 1


async def test_slots_of_long_requests_are_renewed(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """A request that runs for longer than a slot lasts keeps its slot."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(concurrent_requests=1)
    await limiter.admit(alice, 1, 1, 0)
    usage = limiter._usages["key_alice"]
    (slot,) = usage.slots
    assert limiter.take_hit(caller(concurrent_requests=2)) is True  # its limits are changed meanwhile
    slots = limiter._usages["key_alice"].slots
    assert set(slots) == {slot}
    slots[slot] = time.monotonic()  # as if five seconds had passed
    await raw.delete(ALICE_SLOTS)

    async def is_renewed() -> bool:
        return await raw.zscore(ALICE_SLOTS, slot) is not None

    await until(is_renewed)


# Budgets


async def test_concurrent_requests_do_not_overspend(workers: Workers, valkey: Valkey) -> None:
    """What requests may cost is reserved before they begin."""
    limiters = [(await workers.start(valkey)).limiter for _ in range(4)]
    alice = caller(budget_per_day=1.0)
    assert await admitted([limiters[number % 4].admit(alice, 1, 1, 0.03) for number in range(200)]) == 33


async def test_a_budget_counts_what_was_spent(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """A settled request gives back what it did not cost; money adds up without rounding."""
    worker = await workers.start(valkey)
    alice = caller(budget_per_day=1.0, budget_per_month=20.0)
    for _ in range(30):
        admission = await worker.limiter.admit(alice, 1, 1, 0.5)
        admission.settle(2, 0.000_000_1)
        admission.release()
        await worker.limiter.flush()
    assert await raw.hmget(ALICE_SPENT, "day_sum", "month_sum") == [b"3000", b"3000"]

    (await worker.limiter.admit(alice, 1, 1, 0.5)).settle(2, 1.25)
    await worker.limiter.flush()
    with pytest.raises(BudgetExceeded, match=r"The key 'alice' has a budget of 1\.00 USD a day") as refused:
        await worker.limiter.admit(alice, 1, 1, 0)
    assert (refused.value.status, refused.value.code) == (429, "insufficient_quota")
    assert 0 < int(refused.value.headers["Retry-After"]) <= 86_400
    assert worker.limiter.take_hit(alice) is True
    await worker.limiter.admit_hit(caller(requests_per_minute=5, budget_per_day=1.0))  # hits cost nothing


async def test_a_small_budget_is_told_exactly(workers: Workers, valkey: Valkey) -> None:
    """What an answer costs may be far less than a cent."""
    worker = await workers.start(valkey)
    alice = caller(budget_per_day=0.0025)
    await worker.limiter.admit(alice, 1, 1, 0.002)
    with pytest.raises(BudgetExceeded, match=r"a budget of 0\.0025 USD a day \(UTC\), of which 0\.002 are used"):
        await worker.limiter.admit(alice, 1, 1, 0.001)


async def test_a_month_has_a_budget_of_its_own(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """A new day begins with what the month has left; a new month with everything."""
    worker = await workers.start(valkey)
    alice = caller(budget_per_day=1.0, budget_per_month=2.0)
    (await worker.limiter.admit(alice, 1, 1, 0.9)).settle(1, 0.9)
    await worker.limiter.flush()
    day, month = map(int, await raw.hmget(ALICE_SPENT, "day", "month"))
    await raw.hset(ALICE_SPENT, mapping={"day": day - 1, "month_sum": 1_950_000_000})
    with pytest.raises(BudgetExceeded, match=r"2\.00 USD a month"):
        await worker.limiter.admit(alice, 1, 1, 0.1)
    await raw.hset(ALICE_SPENT, mapping={"day": day - 1, "month": month - 1})

    assert await admitted([worker.limiter.admit(alice, 1, 1, 0.9)]) == 1


async def test_a_reservation_of_yesterday_is_not_taken_back_today(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """An answer that ends after midnight counts for the new day."""
    worker = await workers.start(valkey)
    alice = caller(budget_per_day=1.0)
    admission = await worker.limiter.admit(alice, 1, 1, 0.8)
    day = int(await raw.hget(ALICE_SPENT, "day"))
    (money,) = worker.limiter._usages["key_alice"].reserved
    (expires,) = [score for _, score in await raw.zrange(ALICE_RESERVED, 0, -1, withscores=True)]
    await raw.zrem(ALICE_RESERVED, money.text)
    money.text = money.text.replace(f" {day} ", f" {day - 1} ")
    await raw.zadd(ALICE_RESERVED, {money.text: expires})
    await raw.hset(ALICE_SPENT, mapping={"day": day - 1})
    admission.settle(1, 0.25)
    await worker.limiter.flush()

    assert await raw.hget(ALICE_SPENT, "day_sum") == b"250000000"


async def test_money_that_is_told_twice_counts_once(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """A batch whose reply was lost may come again."""
    worker = await workers.start(valkey)
    alice = caller(budget_per_day=1.0)
    (await worker.limiter.admit(alice, 1, 1, 0.5)).settle(1, 0.25)
    news = next(iter(worker.limiter._with_news.values()))
    scopes, batch = news.scopes, news.batch
    await worker.limiter._deliver(scopes, batch, 10**6)
    await worker.limiter._deliver(scopes, batch, 10**6)

    assert await raw.hget(ALICE_SPENT, "day_sum") == b"250000000"


async def test_money_of_a_dead_worker_comes_back(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """A reservation that is not renewed in time counts no more, and one that is settled late counts what was used."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(budget_per_day=1.0, budget_per_month=20.0)
    late = await limiter.admit(alice, 1, 1, 0.75)
    (reserved,) = await raw.zrange(ALICE_RESERVED, 0, -1, withscores=True)
    seconds, _ = await raw.time()
    assert 13_000 < reserved[1] - seconds * 1000 < 17_000
    assert await admitted([limiter.admit(alice, 1, 1, 0.75)]) == 0
    await raw.zadd(ALICE_RESERVED, {reserved[0]: seconds * 1000 - 1})

    (await limiter.admit(alice, 1, 1, 0.75)).settle(1, 0.5)
    await limiter.flush()
    assert await raw.hmget(ALICE_SPENT, "day_sum", "month_sum") == [b"500000000"] * 2
    late.settle(1, 0.25)
    await limiter.flush()
    assert await raw.hmget(ALICE_SPENT, "day_sum", "month_sum") == [b"750000000"] * 2
    assert not await raw.exists(ALICE_RESERVED)


async def test_money_of_long_requests_is_renewed(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """Until it is known what was used, also after the client has left; what expired in an outage is reserved again."""
    limiter = (await workers.start(valkey)).limiter
    alice = caller(budget_per_day=1.0)
    admission = await limiter.admit(alice, 1, 1, 0.75)
    admission.release()
    assert limiter.take_hit(caller(budget_per_day=2.0)) is True  # its limits are changed meanwhile
    (money,) = limiter._usages["key_alice"].reserved
    await raw.zadd(ALICE_RESERVED, {money.text: 1})
    await limiter.admit(alice, 1, 1, 0)
    assert await raw.hget(ALICE_SPENT, "day_sum") == b"0"
    (money,) = limiter._usages["key_alice"].reserved
    money.renewed_at = time.monotonic()  # as if five seconds had passed

    async def is_renewed() -> bool:
        return await raw.zscore(ALICE_RESERVED, money.text) is not None

    await until(is_renewed)
    assert await raw.hget(ALICE_SPENT, "day_sum") == b"750000000"
    admission.settle(1, 0.5)
    await limiter.flush()
    assert await raw.hget(ALICE_SPENT, "day_sum") == b"500000000"
    assert not limiter._usages["key_alice"].reserved


# Redis away


async def test_with_redis_away_each_worker_keeps_to_its_share(workers: Workers, own_valkey: Valkey) -> None:
    """`open` divides limits by the workers that were there."""
    both = [await workers.start(own_valkey) for _ in range(2)]
    alice = caller(requests_per_minute=20, tokens_per_minute=1_000, budget_per_day=1.0)
    (await both[0].limiter.admit(alice, 1, 1, 0.1)).settle(2, 0.1)
    await both[0].limiter.flush()
    await own_valkey.kill()
    for worker in both:
        worker.limiter._workers = 2  # as the first would hear with its next heartbeat

    for worker in both:
        assert (
            await admitted([worker.limiter.admit_hit(caller("bob", requests_per_minute=20)) for _ in range(50)]) == 10
        )
        assert await admitted([worker.limiter.admit(alice, 10, 40, 0) for _ in range(50)]) == 10
    rich = caller("carol", budget_per_day=1.0)
    assert await admitted([both[0].limiter.admit(rich, 1, 1, 0.15) for _ in range(50)]) == 3
    few = caller("dave", concurrent_requests=1)
    admission = await both[0].limiter.admit(few, 1, 1, 0)
    assert await admitted([both[0].limiter.admit(few, 1, 1, 0)]) == 0
    admission.release()
    assert await admitted([both[0].limiter.admit(few, 1, 1, 0)]) == 1


async def test_an_outage_soon_after_another_does_not_renew_the_share(workers: Workers, own_valkey: Valkey) -> None:
    """What a worker let through in the last minute without Redis counts, however often Redis comes and goes."""
    worker = await workers.start(own_valkey)
    alice = caller(requests_per_minute=20, tokens_per_minute=10_000)
    await own_valkey.kill()
    assert await admitted([worker.limiter.admit(alice, 1, 1, 0) for _ in range(15)]) == 15
    await own_valkey.start()
    await worker.redis.breaker.wait_closed()
    assert await admitted([worker.limiter.admit(alice, 1, 1, 0)]) == 1
    await own_valkey.kill()
    assert await admitted([worker.limiter.admit(alice, 1, 1, 0) for _ in range(15)]) == 5


async def test_workers_are_counted(workers: Workers, valkey: Valkey) -> None:
    """Each hears of the others by their heartbeats."""
    started = [await workers.start(valkey) for _ in range(3)]
    await until(lambda: started[2].limiter._workers == 3)


async def test_closed_refuses_without_redis(workers: Workers, own_valkey: Valkey) -> None:
    """`closed` answers 503, also to hits."""
    worker = await workers.start(own_valkey, without_redis="closed")
    alice = caller(requests_per_minute=20, tokens_per_minute=10)
    await own_valkey.kill()
    for request in (worker.limiter.admit(alice, 1, 1, 0), worker.limiter.admit_hit(alice)):
        with pytest.raises(CacheUnavailable):
            await request


async def test_a_frozen_redis_costs_one_deadline(workers: Workers, own_valkey: Valkey) -> None:
    """Requests in flight wait for it once, later ones not at all."""
    worker = await workers.start(own_valkey)
    alice = caller(tokens_per_minute=10**9)
    (await worker.limiter.admit(alice, 1, 1, 0)).settle(1, 0)
    own_valkey.freeze()
    began = time.monotonic()
    await asyncio.gather(*(worker.limiter.admit(alice, 1, 1, 0) for _ in range(20)))
    waited = time.monotonic() - began
    for _ in range(100):
        await worker.limiter.admit(alice, 1, 1, 0)
    own_valkey.thaw()

    assert waited < 0.9
    assert worker.redis.breaker.times_opened == 1


async def test_what_was_used_in_an_outage_is_told_afterwards(workers: Workers, own_valkey: Valkey) -> None:
    """Money that was spent while Redis was away, or reserved before, is counted when it is back."""
    worker = await workers.start(own_valkey)
    alice = caller(budget_per_day=10.0)
    before = await worker.limiter.admit(alice, 1, 1, 2.0)
    await own_valkey.kill()
    before.settle(2, 0.5)
    (await worker.limiter.admit(alice, 1, 1, 2.0)).settle(2, 1.0)
    (await worker.limiter.admit(alice, 1, 1, 2.0)).settle(2, 0.25)
    await own_valkey.start()

    async def is_told() -> bool:
        try:
            return bool(await worker.redis.command(("HGET", ALICE_SPENT, "day_sum"), 1.0) == b"1750000000")
        except StoreUnavailable:
            return False

    await until(is_told)


async def test_a_limiter_that_ends_has_told_redis(valkey: Valkey, workers: Workers, raw: Any) -> None:
    """What the last requests used is not lost."""
    worker = await workers.start(valkey)
    async with open_limiter(worker.redis, KeySettings(required=True)) as limiter:
        (await limiter.admit(caller(budget_per_day=1.0), 1, 1, 0.5)).settle(1, 0.25)

    assert await raw.hget(ALICE_SPENT, "day_sum") == b"250000000"
