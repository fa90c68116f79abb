"""Totals of costs and savings by hour, in integers, money in nano-dollars (docs/decisions/028-costs.md)."""

import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from cache.entries.entry import Entry
from cache.stores.redis_store import RedisStore
from cache.stores.shared_totals import Bucket, Names, SharedTotals, writing_at_the_end
from gateway import metrics
from gateway.costs.pricing import Charge

COUNTERS = (
    "requests",
    "hits",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost",
    "saving",
    "unpriced",
    "estimated",
)
_COST, _SAVING = COUNTERS.index("cost"), COUNTERS.index("saving")
HOUR = 3600
OTHER = "other"
_NANO = 10**9
_MAX_GROUPS = 5_000
_MAX_NAME = 200
_COMPUTED = ("none", "flight")


class Group(NamedTuple):
    """What totals are kept by. `key` is a key's id, `team` its team; both are "" without virtual keys."""

    key: str
    team: str
    model: str
    upstream: str
    layer: str


GroupTotals = dict[Group, list[int]]
"""Integers in the order of COUNTERS."""


class Ledger:
    """Takes what requests cost and saved. Without Redis its totals are those of this process alone."""

    def __init__(self, redis: RedisStore | None, keep: float, clock: Callable[[], float] = time.time) -> None:
        self._keep = max(1, round(keep))
        self._clock = clock
        self._groups: dict[tuple[str, str, str, str, str], list[Any]] = {}
        self.totals = SharedTotals(redis, "costs", Group._fields, COUNTERS, _folded, clock)
        self.listed_models: Callable[[], Collection[str]] = frozenset
        """Those that upstreams list, which have a series of their own in the metrics."""
        self._models = metrics.BoundedLabel()
        self._teams = metrics.BoundedLabel()

    def hit(self, entry: Entry, layer: str, key: str = "", team: str = "", saving: float | None = None) -> None:
        """Count an answer from the cache; it saved `saving` dollars, or what the entry would have cost again."""
        group = self._groups.get((key, team, entry.model, entry.upstream, layer))
        if group is None:
            group = self._new_group(key, team, entry.model, entry.upstream, layer)
        if saving is None:
            saving = entry.repeat_cost
        group[0] += 1
        group[1] += 1
        group[2] += entry.prompt_tokens
        group[3] += entry.cached_tokens
        group[4] += entry.completion_tokens
        if saving is None:
            group[7] += 1
        else:
            group[6] += saving

    def record(self, charge: Charge, key: str = "", team: str = "") -> None:
        """Count a request that an upstream answered, for itself or for another request."""
        group = self._groups.get((key, team, charge.model, charge.upstream, charge.layer))
        if group is None:
            group = self._new_group(key, team, charge.model, charge.upstream, charge.layer)
        group[0] += 1
        group[1] += charge.layer not in _COMPUTED
        group[2] += charge.prompt_tokens
        group[3] += charge.cached_tokens
        group[4] += charge.completion_tokens
        group[5] += charge.cost or 0.0
        group[6] += charge.saving or 0.0
        group[7] += charge.cost is None or charge.saving is None
        group[8] += charge.estimated

    def _new_group(self, *names: str) -> list[Any]:
        """Counters of a group; of one too many, those of the other keys and models of its team and upstream."""
        if len(self._groups) >= _MAX_GROUPS:
            names = _folded(names)
        return self._groups.setdefault(names, [0, 0, 0, 0, 0, 0.0, 0.0, 0, 0])  # type: ignore[arg-type]  # there are five

    def collect(self) -> None:
        """Bring what was counted into the totals of its hour and into the metrics."""
        groups, self._groups = self._groups, {}
        hour = Bucket(str(int(self._clock()) // HOUR), self._keep)
        listed = self.listed_models()
        for names, counts in groups.items():
            group = Group(*(name[:_MAX_NAME] for name in names))
            self._count(group, counts, listed)
            counts[_COST], counts[_SAVING] = (round(counts[place] * _NANO) for place in (_COST, _SAVING))
            self.totals.add(hour, group, counts)

    def _count(self, group: Group, counts: list[Any], listed: Collection[str]) -> None:
        if not counts[_COST] and not counts[_SAVING]:
            return  # names without a price, which clients may invent, make no series
        model, team = self._models.of(group.model, listed), self._teams.of(group.team)
        metrics.cost_dollars.labels(model, group.layer).inc(counts[_COST])
        metrics.saved_dollars.labels(model, group.layer).inc(counts[_SAVING])
        metrics.team_cost_dollars.labels(team).inc(counts[_COST])
        metrics.team_saved_dollars.labels(team).inc(counts[_SAVING])

    async def flush_forever(self) -> None:
        """Collect each second, and add to Redis what it does not have yet."""
        await self.totals.flush_forever(self.collect)

    async def flush(self) -> None:
        """Add to Redis what it does not have yet. Raises StoreUnavailable; then nothing is lost."""
        self.collect()
        await self.totals.flush()

    async def hours(self, first: int, last: int) -> AsyncIterator[tuple[int, GroupTotals]]:
        """The totals of each hour from `first` to `last` (Unix hours) that has any. Raises StoreUnavailable."""
        await self.flush()
        for hour in range(max(first, int(self._clock() - self._keep) // HOUR - 1), last + 1):
            if totals := await self.totals.read(str(hour)):
                yield hour, {Group(*names): counts for names, counts in totals.items()}


@asynccontextmanager
async def open_ledger(redis: RedisStore | None, keep: float) -> AsyncIterator[Ledger]:
    """A ledger that at its end writes what it has. The caller runs `flush_forever`."""
    ledger = Ledger(redis, keep)
    async with writing_at_the_end(ledger.totals, ledger.collect):
        yield ledger


def _folded(names: Names) -> Names:
    """The other keys and models of the same team and upstream."""
    return Group(*names)._replace(key=OTHER, model=OTHER)
