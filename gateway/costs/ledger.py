"""Totals of costs and savings by hour: in this process, and each second added to those in Redis.

An hour is a hash of integers, money in nano-dollars. A field's name is the JSON array of a group and a counter, so no
name can break it. A batch has a number, and its hour remembers the last number of each process: a batch that is sent
again after a lost reply counts once (docs/decisions/028-costs.md).
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from cache.entries.entry import Entry
from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore
from gateway import metrics
from gateway.costs.pricing import Charge

log = logging.getLogger(__name__)

COUNTERS = ("requests", "hits", "prompt_tokens", "cached_tokens", "completion_tokens", "cost", "saving", "unpriced")
_COST, _SAVING = COUNTERS.index("cost"), COUNTERS.index("saving")
HOUR = 3600
OTHER = "other"
_NANO = 10**9
_FLUSH_SECONDS = 1.0
_DEADLINE = 2.0
_MAX_GROUPS = 5_000
_MAX_TOTALS = 50_000
_MAX_NAME = 200
_FIELDS_PER_BATCH = 2_000
_COMPUTED = ("none", "flight")
# KEYS: an hour. ARGV: process, number of the batch, seconds to keep the hour, then fields and what is added to them.
_ADD = """
local last = redis.call('HGET', KEYS[1], ARGV[1])
if last and tonumber(last) >= tonumber(ARGV[2]) then return 0 end
for i = 4, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""


class Group(NamedTuple):
    """What totals are kept by. `key` is a key's id, `team` its team; both are "" without virtual keys."""

    key: str
    team: str
    model: str
    upstream: str
    layer: str


Totals = dict[Group, list[int]]
"""Integers in the order of COUNTERS."""


class _Batch(NamedTuple):
    hour: int
    number: int
    parts: list[str | int]


class Ledger:
    """Takes what requests cost and saved. Without Redis its totals are those of this process alone."""

    def __init__(self, redis: RedisStore | None, keep: float, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._keep = max(1, round(keep))
        self._clock = clock
        self._groups: dict[tuple[str, str, str, str, str], list[Any]] = {}
        self._hours: dict[int, Totals] = {}  # with Redis: what it does not have yet
        self._size = 0
        self._process = f"process {secrets.token_hex(8)}"
        self._batches = 0
        self._unsent: _Batch | None = None
        self._flushing = asyncio.Lock()
        self.listed_models: Callable[[], Collection[str]] = frozenset
        """Those that upstreams list, which have a series of their own in the metrics."""
        self._models = metrics.BoundedLabel()
        self._teams = metrics.BoundedLabel()
        self._is_failing = False

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

    def _new_group(self, *names: str) -> list[Any]:
        """Counters of a group; of one too many, those of the other keys and models of its team and upstream."""
        if len(self._groups) >= _MAX_GROUPS:
            names = _folded(Group(*names))
        return self._groups.setdefault(names, [0, 0, 0, 0, 0, 0.0, 0.0, 0])  # type: ignore[arg-type]  # there are five

    def collect(self) -> None:
        """Bring what was counted into the totals of its hour and into the metrics."""
        groups, self._groups = self._groups, {}
        hour = int(self._clock()) // HOUR
        listed = self.listed_models()
        for names, counts in groups.items():
            group = Group(*(name[:_MAX_NAME] for name in names))
            self._count(group, counts, listed)
            counts[_COST], counts[_SAVING] = (round(counts[place] * _NANO) for place in (_COST, _SAVING))
            self._add(hour, group, counts)
        for old in [known for known in self._hours if known < hour - self._keep // HOUR - 1]:
            self._size -= len(self._hours.pop(old))

    def _count(self, group: Group, counts: list[Any], listed: Collection[str]) -> None:
        if not counts[_COST] and not counts[_SAVING]:
            return  # names without a price, which clients may invent, make no series
        model, team = self._models.of(group.model, listed), self._teams.of(group.team)
        metrics.cost_dollars.labels(model, group.layer).inc(counts[_COST])
        metrics.saved_dollars.labels(model, group.layer).inc(counts[_SAVING])
        metrics.team_cost_dollars.labels(team).inc(counts[_COST])
        metrics.team_saved_dollars.labels(team).inc(counts[_SAVING])

    def _add(self, hour: int, group: Group, counts: Iterable[int]) -> None:
        totals = self._hours.setdefault(hour, {})
        if group not in totals and self._size >= _MAX_TOTALS:
            group = _folded(group)
        if group not in totals:
            totals[group] = [0] * len(COUNTERS)
            self._size += 1
        for place, count in enumerate(counts):
            totals[group][place] += count

    async def flush_forever(self) -> None:
        """Collect and flush each second. A Redis that does not take a batch gets it again."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            try:
                await self.flush()
                self._is_failing = False
            except StoreUnavailable as error:
                if not self._is_failing:
                    log.warning("costs wait to be written: %s", error)
                self._is_failing = True

    async def flush(self) -> None:
        """Add to Redis what it does not have yet. Raises StoreUnavailable; then nothing is lost."""
        self.collect()
        if self._redis is None:
            return
        async with self._flushing:
            while (batch := self._next_batch()) is not None:
                command = ("EVAL", _ADD, 1, _key(batch.hour), self._process, batch.number, self._keep, *batch.parts)
                await self._redis.command(command, _DEADLINE)
                self._unsent = None

    def _next_batch(self) -> _Batch | None:
        """The batch that Redis may or may not have taken, else one of the oldest hour; None if all is there."""
        if self._unsent is not None or not self._hours:
            return self._unsent
        hour = min(self._hours)
        totals = self._hours[hour]
        parts: list[str | int] = []
        while totals and len(parts) < 2 * _FIELDS_PER_BATCH:
            group, counts = totals.popitem()
            self._size -= 1
            for name, count in zip(COUNTERS, counts, strict=True):
                if count:
                    parts += (json.dumps([*group, name]), count)
        if not totals:
            del self._hours[hour]
        self._batches += 1
        self._unsent = _Batch(hour, self._batches, parts)
        return self._unsent

    async def hours(self, first: int, last: int) -> AsyncIterator[tuple[int, Totals]]:
        """The totals of each hour from `first` to `last` (Unix hours) that has any. Raises StoreUnavailable."""
        await self.flush()
        if self._redis is None:
            for hour in sorted(hour for hour in self._hours if first <= hour <= last):
                yield hour, self._hours[hour]
            return
        for hour in range(max(first, int(self._clock() - self._keep) // HOUR - 1), last + 1):
            fields = await self._redis.command(("HGETALL", _key(hour)), _DEADLINE)
            if fields:
                yield hour, await asyncio.to_thread(_totals, fields)


@asynccontextmanager
async def open_ledger(redis: RedisStore | None, keep: float) -> AsyncIterator[Ledger]:
    """A ledger that at its end writes what it has. The caller runs `flush_forever`."""
    ledger = Ledger(redis, keep)
    try:
        yield ledger
    finally:
        try:
            await ledger.flush()
        except StoreUnavailable as error:
            log.warning("costs of the last moments were not written to redis: %s", error)


def _key(hour: int) -> str:
    return f"keepgate:costs:{hour}"


def _folded(group: Group) -> Group:
    return group._replace(key=OTHER, model=OTHER)


_decode_field = msgspec.json.Decoder(tuple[str, str, str, str, str, str]).decode


def _totals(fields: Any) -> Totals:
    """The reply to HGETALL, a list in RESP2 and a map in RESP3; what is no counter of this version is passed over."""
    pairs = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
    totals: Totals = {}
    for field, count in pairs:
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            *names, counter = _decode_field(field)
            totals.setdefault(Group(*names), [0] * len(COUNTERS))[COUNTERS.index(counter)] += int(count)
    return totals
