"""What became of requests: sums by minute, by hour and of all time, in all and by model, key and namespace.

Workers and hosts that share a Redis share the sums, which outlive all of them. Money is in nano-dollars, time saved in
milliseconds. Durations are counted in classes, from which percentiles are read.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal, TypeVar

import msgspec

from cache.stores.redis_store import RedisStore
from cache.stores.shared_totals import Bucket, Names, SharedTotals, Totals, writing_at_the_end
from gateway.telemetry.record import RequestRecord

LAYERS = ("exact", "normalized", "semantic")
COUNTERS = (
    "requests",
    *LAYERS,
    "shared",
    "computed",
    "bypasses",
    "failures",
    "errors",
    "prompt_tokens",
    "completion_tokens",
    "saved_prompt_tokens",
    "saved_completion_tokens",
    "saved_ms",
    "cost",
    "saving",
    "unpriced",
)
Dimension = Literal["all", "model", "key", "namespace"]
DIMENSIONS: tuple[Dimension, ...] = ("all", "model", "key", "namespace")
ALL = ("all", "")
WINDOWS = {"1m": 60, "5m": 300, "1h": 3600, "all": 0}
"""Names of periods that end now, with their seconds; 0 is of all time."""

MINUTE, HOUR = 60, 3600
_MINUTES_KEPT = 3 * HOUR
_MAX_NAMES = 500
"""Of a dimension in an hour and a process; later names are other."""
_MAX_NAME = 200
_OTHER = "other"
_ERRORS = 400
"""The first status of an error, which costs nothing."""
_NANO = 10**9
# A minute that is over still gets what was not flushed at its end.
_READ_AGAIN_SECONDS = 60.0
_CLASSES = [step * 10.0**power for power in range(-4, 2) for step in (1, 2, 5)] + [100.0]
"""Upper bounds in seconds, from .1 ms on."""
_CLASS_NAMES = (*(f"{bound:g}" for bound in _CLASSES), "more")
_EVER = Bucket("ever")


class Durations(msgspec.Struct, frozen=True):
    """Percentiles in seconds, null where nothing was measured; read from classes that are at most 2.5 times apart."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class LayerFigures(msgspec.Struct, kw_only=True):
    """Hits of a layer, and their share of the requests that the cache was asked for."""

    hits: int
    hit_rate: float


class SavedFigures(msgspec.Struct, kw_only=True):
    """What hits and shared calls did not compute again; dollars where prices are known."""

    prompt_tokens: int
    completion_tokens: int
    seconds: float
    dollars: float


class Figures(msgspec.Struct, kw_only=True):
    """What became of requests: `hits` of a layer; `shared`, by the upstream call of another request; `computed`, by a
    call of their own after a miss; `bypasses`, which the cache was not asked for; `failures`, computed since the cache
    did not answer; `errors` of the gateway. Tokens and cost are of what was computed; rates are shares between 0 and 1.
    `unpriced` are answers whose cost or saving is not known, and is in no sum.
    """

    requests: int
    hits: int
    hit_rate: float
    layers: dict[str, LayerFigures]
    shared: int
    computed: int
    bypasses: int
    failures: int
    errors: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    unpriced: int
    saved: SavedFigures


F = TypeVar("F", bound=Figures)


class Statistics:
    """Counts requests as they end. The caller runs `flush_forever`."""

    def __init__(self, redis: RedisStore | None, keep: float, clock: Callable[[], float] = time.time) -> None:
        """`keep` is for how many seconds the sums of an hour are kept."""
        self._keep = max(HOUR, round(keep))
        self._clock = clock
        self._groups: dict[tuple[str, str, str, str, str], tuple[list[Any], list[int]]] = {}
        self._tokens = [0] * len(_CLASS_NAMES)
        self._names: dict[str, set[str]] = {}
        self._names_of = 0
        self.totals = SharedTotals(redis, "statistics", ("dimension", "name"), COUNTERS, lambda _: ALL, clock)
        self.classes = SharedTotals(redis, "durations", ("kind", "cache"), _CLASS_NAMES, lambda names: names, clock)
        self._read: dict[tuple[SharedTotals, int], tuple[float, Totals]] = {}

    def count(self, record: RequestRecord) -> None:
        """Count a request for an answer that has ended."""
        cache = record.cache
        names = (cache, record.layer, record.model, record.key, record.namespace)
        group = self._groups.get(names)
        if group is None:
            group = self._groups.setdefault(names, ([0, 0, 0, 0.0, 0.0, 0.0, 0], [0] * len(_CLASS_NAMES)))
        sums, first_bytes = group
        sums[0] += 1
        sums[1] += record.prompt_tokens
        sums[2] += record.completion_tokens
        sums[3] += record.saved_seconds
        if record.cost:
            sums[4] += record.cost
        if record.saving:
            sums[5] += record.saving
        if record.cost is None or record.saving is None:
            sums[6] += bool(cache) and (record.status < _ERRORS or record.completion_tokens > 0)
        first_bytes[bisect_left(_CLASSES, record.first_byte_at - record.began)] += 1
        if cache != "hit" and cache and record.stream and record.completion_tokens > 1:
            seconds = (record.ended - record.first_byte_at) / (record.completion_tokens - 1)
            self._tokens[bisect_left(_CLASSES, seconds)] += 1

    def collect(self) -> None:
        """Bring what was counted into the sums of its minute and hour, and those of all time."""
        now = int(self._clock())
        groups, self._groups = self._groups, {}
        durations = {("token", "miss"): self._tokens}
        self._tokens = [0] * len(_CLASS_NAMES)
        minute, hour = Bucket(f"minute:{now // MINUTE}", _MINUTES_KEPT), Bucket(f"hour:{now // HOUR}", self._keep)
        sums: dict[Names, list[int]] = {}
        for names, (counted, first_bytes) in groups.items():
            if names[0]:
                _add(durations.setdefault(("first_byte", _hit_or_miss(names[0])), [0] * len(_CLASS_NAMES)), first_bytes)
            counts = _counts(*names[:2], *counted)
            for group in (ALL, *self._groups_of(now // HOUR, *names[2:])):
                _add(sums.setdefault(group, [0] * len(COUNTERS)), counts)
        for group, counts in sums.items():
            for bucket in (minute, hour, _EVER):
                self.totals.add(bucket, group, counts)
        for kind, counts in durations.items():
            for bucket in (minute, hour) if any(counts) else ():
                self.classes.add(bucket, kind, counts)

    def _groups_of(self, hour: int, model: str, key: str, namespace: str) -> Iterable[Names]:
        if hour != self._names_of:
            self._names, self._names_of = {}, hour
        for dimension, name in (("model", model), ("key", key), ("namespace", namespace)):
            if name:
                known = self._names.setdefault(dimension, set())
                if name not in known and len(known) >= _MAX_NAMES:
                    name = _OTHER
                known.add(name)
                yield dimension, name[:_MAX_NAME]

    async def flush_forever(self) -> None:
        """Collect each second, and add to Redis what it does not have yet."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.totals.flush_forever(self.collect))
            tasks.create_task(self.classes.flush_forever(lambda: None))

    async def window(self, name: str) -> Totals:
        """The sums of one of WINDOWS, by dimension and name. Raises StoreUnavailable."""
        await self._flush()
        if not WINDOWS[name]:
            return await self.totals.read(_EVER.name)
        return await self._last(self.totals, WINDOWS[name])

    async def durations(self, name: str) -> dict[Names, Durations]:
        """Percentiles by kind (first_byte, token) and cache (hit, miss) in one of WINDOWS, of which "all" is an hour.

        Raises StoreUnavailable.
        """
        await self._flush()
        found = await self._last(self.classes, WINDOWS[name] or HOUR)
        return {names: _percentiles(counts) for names, counts in found.items()}

    async def timeline(self, first: int, last: int, step: Literal[60, 3600]) -> list[tuple[int, Totals]]:
        """(Unix time, sums) of each minute or hour from `first` to `last`, in such units. Raises StoreUnavailable."""
        await self._flush()
        kind = "minute" if step == MINUTE else "hour"
        found = await self.totals.read_all([f"{kind}:{number}" for number in range(first, last + 1)])
        return [(number * step, totals) for number, totals in zip(range(first, last + 1), found, strict=True)]

    async def _flush(self) -> None:
        self.collect()
        await self.totals.flush()
        await self.classes.flush()

    async def _last(self, store: SharedTotals, seconds: int) -> Totals:
        """The sums of the last so many seconds: those of whole minutes, and of the first one that part which counts."""
        now = self._clock()
        current = int(now) // MINUTE
        minutes = list(range(current - seconds // MINUTE, current + 1))
        found = await self._minutes(store, minutes)
        share = 1 - (now % MINUTE) / MINUTE
        sums: dict[Names, list[float]] = {}
        for totals, weight in zip(found, [share] + [1.0] * (len(minutes) - 1), strict=True):
            for names, counts in totals.items():
                into = sums.setdefault(names, [0.0] * len(counts))
                for place, count in enumerate(counts):
                    into[place] += weight * count
        return {names: [round(count) for count in counts] for names, counts in sums.items()}

    async def _minutes(self, store: SharedTotals, minutes: Sequence[int]) -> list[Totals]:
        """The sums of each minute; those that are over are asked for again after a minute only."""
        now = self._clock()
        oldest = min(minutes)
        for key in [key for key in self._read if key[0] is store and key[1] < oldest - HOUR // MINUTE]:
            del self._read[key]
        missing = [
            minute
            for minute in minutes
            if (read := self._read.get((store, minute))) is None or not 0 <= now - read[0] < _READ_AGAIN_SECONDS
        ]
        found = await store.read_all([f"minute:{minute}" for minute in missing])
        read_now = dict(zip(missing, found, strict=True))
        for minute, totals in read_now.items():
            if minute < int(now) // MINUTE:
                self._read[store, minute] = (now, totals)
        return [read_now[minute] if minute in read_now else self._read[store, minute][1] for minute in minutes]


def _add(sums: list[int], counts: Sequence[int]) -> None:
    for place, count in enumerate(counts):
        sums[place] += count


def _hit_or_miss(cache: str) -> str:
    return "hit" if cache == "hit" else "miss"


def _counts(
    cache: str,
    layer: str,
    requests: int,
    prompt: int,
    completion: int,
    saved: float,
    cost: float,
    saving: float,
    unpriced: int,
) -> list[int]:
    """In the order of COUNTERS."""
    counts = dict.fromkeys(COUNTERS, 0)
    outcome = _outcome(cache, layer)
    counts |= {"requests": requests, outcome: requests, "saved_ms": round(saved * 1000)}
    counts |= {"cost": round(cost * _NANO), "saving": round(saving * _NANO), "unpriced": unpriced}
    prefix = "saved_" if outcome in (*LAYERS, "shared") else ""
    counts |= {f"{prefix}prompt_tokens": prompt, f"{prefix}completion_tokens": completion}
    return list(counts.values())


def _outcome(cache: str, layer: str) -> str:
    if layer == "flight":
        return "shared"
    if cache == "hit":
        return layer
    return {"miss": "computed", "bypass": "bypasses", "failed": "failures"}.get(cache, "errors")


def _percentiles(counts: Sequence[int]) -> Durations:
    return Durations(*(_percentile(counts, share) for share in (0.5, 0.9, 0.99)))


def _percentile(counts: Sequence[int], share: float) -> float | None:
    """Between the bounds of its class in proportion; the highest bound for what is beyond it."""
    total = sum(counts)
    rank, below = share * total, 0
    for place, count in enumerate(counts):
        if count and below + count >= rank:
            if place == len(_CLASSES):
                return _CLASSES[-1]
            lower = _CLASSES[place - 1] if place else 0.0
            return lower + (_CLASSES[place] - lower) * (rank - below) / count
        below += count
    return None


def figures(kind: type[F], counts: Sequence[int], **more: Any) -> F:
    """Sums as an operator reads them; `more` are further fields of their kind."""
    sums = dict(zip(COUNTERS, counts, strict=True))
    hits = sum(sums[layer] for layer in LAYERS)
    asked = hits + sums["shared"] + sums["computed"] + sums["failures"]
    return kind(
        requests=sums["requests"],
        hits=hits,
        hit_rate=_rate(hits, asked),
        layers={layer: LayerFigures(hits=sums[layer], hit_rate=_rate(sums[layer], asked)) for layer in LAYERS},
        **{outcome: sums[outcome] for outcome in ("shared", "computed", "bypasses", "failures", "errors")},
        prompt_tokens=sums["prompt_tokens"],
        completion_tokens=sums["completion_tokens"],
        cost=sums["cost"] / _NANO,
        unpriced=sums["unpriced"],
        saved=SavedFigures(
            prompt_tokens=sums["saved_prompt_tokens"],
            completion_tokens=sums["saved_completion_tokens"],
            seconds=sums["saved_ms"] / 1000,
            dollars=sums["saving"] / _NANO,
        ),
        **more,
    )


def _rate(hits: int, asked: int) -> float:
    return round(hits / asked, 6) if asked else 0.0


NOTHING = (0,) * len(COUNTERS)


@asynccontextmanager
async def open_statistics(redis: RedisStore | None, keep: float) -> AsyncIterator[Statistics]:
    """Statistics that at their end write what they have."""
    statistics = Statistics(redis, keep)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(writing_at_the_end(statistics.classes, statistics.collect))
        await stack.enter_async_context(writing_at_the_end(statistics.totals, statistics.collect))
        yield statistics
