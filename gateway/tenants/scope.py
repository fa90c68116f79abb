"""A scope of limits, a key's or its team's, and how a refusal is told."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gateway import metrics
from gateway.errors import BudgetExceeded, RateLimited
from gateway.tenants.virtual_key import Limits, VirtualKey

NANO = 10**9
"""Nano-dollars of a dollar: money is added as integers."""
# In the order of the scripts' arguments, from 1.
REQUESTS, TOKENS, SLOTS, DAY, MONTH = 1, 2, 3, 4, 5
# Clients such as OpenAI's SDKs wait for a minute at most when they are told to.
_LONGEST_WAIT = 60.0
_NAMES = {REQUESTS: "requests", TOKENS: "tokens", SLOTS: "concurrent", DAY: "budget_day", MONTH: "budget_month"}


@dataclass(frozen=True, slots=True)
class Scope:
    """`numbers` are its limits as the scripts have them, -1 for none; `keys` are where Redis counts what is used."""

    kind: Literal["key", "team"]
    name: str
    numbers: tuple[int, ...]
    keys: tuple[str, ...]

    def limit(self, which: int) -> int:
        """-1 for none."""
        return self.numbers[which - 1]

    @property
    def spent_key(self) -> str:
        """Where Redis has what was spent by day and month."""
        return self.keys[2]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A limit that is reached; `wait` is in seconds, `used` in the limit's unit."""

    scope: Scope
    which: int
    wait: float
    used: int

    def error(self) -> RateLimited:
        """The error that the client gets, which is counted here."""
        metrics.limit_refusals.labels(self.scope.kind, _NAMES[self.which]).inc()
        limit = self.scope.limit(self.which)
        whose = f"The {self.scope.kind} {self.scope.name!r}"
        if self.which in (DAY, MONTH):
            when = "day" if self.which == DAY else "month"
            return BudgetExceeded(
                f"{whose} has a budget of {_dollars(limit)} USD a {when} (UTC), of which {_dollars(self.used)} are"
                " used or reserved: too little is left for this request.",
                self.wait,
                {},
            )
        what = {
            REQUESTS: f"{limit} requests a minute",
            TOKENS: f"{limit} tokens a minute",
            SLOTS: f"{limit} concurrent requests",
        }[self.which]
        figures = {} if self.which == SLOTS else rate_headers(_NAMES[self.which], limit, limit - self.used, self.wait)
        wait = min(self.wait, _LONGEST_WAIT)
        return RateLimited(f"{whose} may have {what}; try again in {wait:.0f} s.", wait, figures)


def scope_of_key(key: VirtualKey) -> Scope:
    """The key's own, which may have no limit. Those of a key and its team are in one hash slot of a cluster."""
    return Scope("key", key.name, _numbers(key.limits), _keys(f"{_place(key.team or key.id)}:key:{key.id}"))


def scope_of_team(name: str, limits: Limits) -> Scope:
    """Of all keys of a team together; it may have no limit."""
    return Scope("team", name, _numbers(limits), _keys(f"{_place(name)}:team"))


def scopes_of(key: VirtualKey) -> tuple[Scope, ...]:
    """The scopes that have limits: the key's and its team's."""
    scopes = (scope_of_key(key), *((scope_of_team(key.team, key.team_limits),) if key.team else ()))
    return tuple(scope for scope in scopes if any(number >= 0 for number in scope.numbers))


def rate_headers(name: str, limit: int, remaining: int, wait: float) -> dict[str, str]:
    """OpenAI's headers of a limit by the minute; `name` is requests or tokens."""
    return {
        f"x-ratelimit-limit-{name}": str(limit),
        f"x-ratelimit-remaining-{name}": str(max(0, remaining)),
        f"x-ratelimit-reset-{name}": f"{wait:.3f}".rstrip("0").rstrip(".") + "s",
    }


def tightest(scopes: Sequence[Scope], which: int, used: Sequence[int]) -> tuple[int, int] | None:
    """The limit of which least is left, and how much that is; None if no scope has this limit."""
    limits = [(scope.limit(which), scope.limit(which) - taken) for scope, taken in zip(scopes, used, strict=True)]
    return min((pair for pair in limits if pair[0] >= 0), key=lambda pair: pair[1], default=None)


def _dollars(nano: int) -> str:
    """To the cent; less than a dollar exactly, since an answer may cost far less than a cent."""
    return f"{nano / NANO:.2f}" if nano >= NANO or not nano else f"{nano / NANO:.9f}".rstrip("0")


def _numbers(limits: Limits) -> tuple[int, ...]:
    counts = (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrent_requests)
    budgets = (limits.budget_per_day, limits.budget_per_month)
    return (
        *(-1 if count is None else count for count in counts),
        *(-1 if budget is None else round(budget * NANO) for budget in budgets),
    )


def _place(name: str) -> str:
    return f"keepgate:{{limits:{name}}}"


def _keys(prefix: str) -> tuple[str, ...]:
    return f"{prefix}:window", f"{prefix}:slots", f"{prefix}:spent", f"{prefix}:reserved"
