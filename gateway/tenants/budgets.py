"""What is spent of budgets, as the limiter counts it in Redis for all workers and hosts."""

import calendar
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore
from gateway.tenants.key_registry import Team
from gateway.tenants.scope import DAY, MONTH, NANO, Scope, scope_of_key, scope_of_team
from gateway.tenants.virtual_key import VirtualKey

_SECONDS_OF_DAY = 86_400
_AT_ONCE = 1_000
_DEADLINE = 2.0


class BudgetUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of a day or a month of UTC, in US dollars. `spent` has what is reserved for requests that run; `ends` is when it
    begins anew, Unix seconds.
    """

    budget: float
    spent: float
    ends: float


class SpentBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of a key, or of all keys of a team together; null where there is none. `id` of a team is its name."""

    kind: Literal["key", "team"]
    id: str
    name: str
    team: str
    day: BudgetUse | None
    month: BudgetUse | None


async def read_budgets(
    redis: RedisStore, keys: Sequence[VirtualKey], teams: Sequence[Team], clock: Callable[[], float] = time.time
) -> list[SpentBudget]:
    """Those of keys that are not revoked, then those of teams. Raises StoreUnavailable."""
    scopes = [
        *((key.id, key.team, scope_of_key(key)) for key in keys if not key.revoked),
        *((team.name, "", scope_of_team(team.name, team.limits)) for team in teams),
    ]
    limited = [each for each in scopes if each[2].limit(DAY) >= 0 or each[2].limit(MONTH) >= 0]
    stored = await _read(redis, [scope for _, _, scope in limited])
    now = datetime.fromtimestamp(clock(), UTC)
    return [_spent(*each, fields, now) for each, fields in zip(limited, stored, strict=True)]


async def _read(redis: RedisStore, scopes: Iterable[Scope]) -> list[list[bytes | None]]:
    """Of each scope the day (since 1970), the month (12 * year + month), and the nano-dollars of both: window.lua."""
    commands = [("HMGET", scope.spent_key, "day", "month", "day_sum", "month_sum") for scope in scopes]
    found: list[list[bytes | None]] = []
    for start in range(0, len(commands), _AT_ONCE):
        replies = await redis.commands(commands[start : start + _AT_ONCE], _DEADLINE)
        for reply in replies:
            if isinstance(reply, Exception):
                raise StoreUnavailable(f"redis: {reply}")
            found.append(reply)
    return found


def _spent(id_: str, team: str, scope: Scope, stored: Sequence[bytes | None], now: datetime) -> SpentBudget:
    day, month, day_sum, month_sum = (int(field or 0) for field in stored)
    is_today = day == int(now.timestamp()) // _SECONDS_OF_DAY
    is_this_month = month == 12 * now.year + now.month
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    first = midnight.replace(day=1)
    days = calendar.monthrange(now.year, now.month)[1]
    return SpentBudget(
        kind=scope.kind,
        id=id_,
        name=scope.name,
        team=team,
        day=_use(scope.limit(DAY), day_sum if is_today else 0, midnight + timedelta(days=1)),
        month=_use(scope.limit(MONTH), month_sum if is_this_month else 0, first + timedelta(days=days)),
    )


def _use(limit: int, spent: int, ends: datetime) -> BudgetUse | None:
    if limit < 0:
        return None
    return BudgetUse(budget=limit / NANO, spent=max(0, spent) / NANO, ends=ends.timestamp())
