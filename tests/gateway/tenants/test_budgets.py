"""What is spent of budgets is read as the limiter counts it, without a change of it."""

import time
from datetime import UTC, datetime
from typing import Any

from gateway.tenants.budgets import SpentBudget, read_budgets
from gateway.tenants.key_registry import Team
from gateway.tenants.scope import scope_of_key
from gateway.tenants.virtual_key import Limits, VirtualKey
from tests.cache.valkey import Valkey
from tests.gateway.tenants.conftest import Workers, caller


def key_of(name: str = "alice", team: str = "", team_limits: Limits | None = None, **limits: Any) -> VirtualKey:
    key = caller(name, team, team_limits, **limits).key
    assert key is not None
    return key


def shown(budget: SpentBudget) -> tuple[str, str, float | None, float | None]:
    return (
        budget.kind,
        budget.id,
        None if budget.day is None else budget.day.spent,
        None if budget.month is None else budget.month.spent,
    )


async def test_the_budgets_of_keys_and_teams_of_all_workers(workers: Workers, valkey: Valkey) -> None:
    """What two workers were charged for a key counts for it and for its team; reservations of requests that run count
    as well, and go when less was used.
    """
    first, second = await workers.start(valkey), await workers.start(valkey)
    team = Team(name="web", limits=Limits(budget_per_month=100.0))
    alice = caller("alice", "web", team.limits, budget_per_day=5.0)
    bob, idle = caller("bob", "web", team.limits), caller("idle", budget_per_day=1.0, budget_per_month=2.0)
    keys = [each.key for each in (alice, bob, idle) if each.key is not None]

    async def budgets() -> list[tuple[str, str, float | None, float | None]]:
        return [shown(budget) for budget in await read_budgets(first.redis, keys, [team])]

    assert await budgets() == [
        ("key", "key_alice", 0.0, None),
        ("key", "key_idle", 0.0, 0.0),
        ("team", "web", None, 0.0),
    ]
    running = await first.limiter.admit(alice, 5, 5, 1.5)
    assert (await budgets())[0] == ("key", "key_alice", 1.5, None)
    running.settle(10, 0.25)
    running.release()
    other = await second.limiter.admit(bob, 5, 5, 0.5)
    other.settle(10, 0.5)
    other.release()
    for worker in (first, second):
        worker.limiter.end_leases()
        await worker.limiter.flush()
    assert await budgets() == [
        ("key", "key_alice", 0.25, None),
        ("key", "key_idle", 0.0, 0.0),
        ("team", "web", None, 0.75),
    ]


async def test_a_day_and_a_month_begin_anew(workers: Workers, valkey: Valkey, raw: Any) -> None:
    """What was spent on another day does not count for the day, nor that of another month for the month."""
    worker = await workers.start(valkey)
    alice = key_of(budget_per_day=5.0, budget_per_month=50.0)

    async def spent(at: datetime) -> tuple[float, float, str, str]:
        (budget,) = await read_budgets(worker.redis, [alice], [], at.timestamp)
        assert budget.day is not None
        assert budget.month is not None
        day, month = (datetime.fromtimestamp(use.ends, UTC).isoformat() for use in (budget.day, budget.month))
        return budget.day.spent, budget.month.spent, day, month

    then = datetime(2028, 2, 28, 23, 59, tzinfo=UTC)
    stored = {
        "day": int(then.timestamp()) // 86_400,
        "month": 12 * 2028 + 2,
        "day_sum": 2 * 10**9,
        "month_sum": 7 * 10**9,
    }
    await raw.hset(scope_of_key(alice).spent_key, mapping=stored)
    assert await spent(then) == (2.0, 7.0, "2028-02-29T00:00:00+00:00", "2028-03-01T00:00:00+00:00")
    assert await spent(datetime(2028, 2, 29, tzinfo=UTC)) == (0.0, 7.0, *["2028-03-01T00:00:00+00:00"] * 2)
    assert (await spent(datetime(2028, 3, 1, tzinfo=UTC)))[:2] == (0.0, 0.0)
    assert await raw.hgetall(scope_of_key(alice).spent_key) == {
        name.encode(): str(value).encode() for name, value in stored.items()
    }


async def test_revoked_keys_and_keys_without_a_budget_are_left_out(workers: Workers, valkey: Valkey) -> None:
    """They spend nothing, or may spend anything."""
    worker = await workers.start(valkey)
    revoked = VirtualKey(id="key_1", name="a", created=time.time(), revoked=True, limits=Limits(budget_per_day=1.0))
    limited = key_of(requests_per_minute=5)
    team = Team(name="web", limits=Limits(tokens_per_minute=5))
    assert await read_budgets(worker.redis, [revoked, limited], [team]) == []


async def test_thousands_of_keys_are_read_in_few_calls(workers: Workers, valkey: Valkey) -> None:
    """Each key gets its own figure, in the order of the keys."""
    worker = await workers.start(valkey)
    keys = [key_of(f"k{number}", budget_per_day=1.0) for number in range(2_500)]
    assert [budget.id for budget in await read_budgets(worker.redis, keys, [])] == [key.id for key in keys]
