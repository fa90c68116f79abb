"""The figures of the cache, for the operator: now, over the last minutes, and over time."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.stores.shared_totals import Names, Totals
from gateway.api import stats
from gateway.api.access import require_operator
from gateway.api.app_keys import CACHE, GAUGES, SEMANTIC, STATISTICS
from gateway.errors import CacheUnavailable, InvalidRequest
from gateway.telemetry.statistics import (
    ALL,
    DIMENSIONS,
    NOTHING,
    WINDOWS,
    Durations,
    Figures,
    figures,
)

_encode = msgspec.json.Encoder().encode

_NAMED = DIMENSIONS[1:]
_AGES = (60.0, 600.0, 3600.0, 6 * 3600.0, 86_400.0, 7 * 86_400.0)
_SIZES = (1_000, 4_000, 16_000, 64_000, 256_000, 1_000_000)
_SAMPLE = 200
_STEPS: dict[str, Literal[60, 3600]] = {"1m": 60, "1h": 3600}
_MAX_STEPS = 744


class FirstByte(msgspec.Struct, kw_only=True):
    """From a request's arrival to the first byte of its answer."""

    hit: Durations
    miss: Durations


class Window(Figures, kw_only=True):
    """The figures of a time that ends now. Durations of all time are those of an hour."""

    first_byte: FirstByte
    between_tokens: Durations


class NamedFigures(Figures, kw_only=True):
    """The figures of a model, a key or a namespace."""

    name: str


class Breakdown(msgspec.Struct, kw_only=True):
    dimension: Literal["model", "key", "namespace"]
    window: Literal["1m", "5m", "1h", "all"]
    data: list[NamedFigures]


class AgeClass(msgspec.Struct, kw_only=True):
    """Entries that are at most `up_to` seconds old, and older than the class before; null is no bound."""

    up_to: float | None
    entries: int


class SizeClass(msgspec.Struct, kw_only=True):
    """The share of entries of at most `up_to` bytes, and more than the class before; of a sample."""

    up_to: int | None
    share: float


class TimelinePoint(Figures, kw_only=True):
    """The figures of a minute or an hour from `time`, Unix seconds."""

    time: int
    by: list[NamedFigures] | msgspec.UnsetType = msgspec.UNSET


class Timeline(msgspec.Struct, kw_only=True):
    """The oldest step first; `step` in seconds."""

    object: Literal["list"] = "list"
    step: int
    data: list[TimelinePoint]


async def get_stats(request: web.Request) -> web.Response:
    """GET /v1/cache/stats: what each layer does, in all and in windows of time; with `?by=` also for each name."""
    require_operator(request)
    by, window = _by(request)
    request.app[GAUGES].refresh()
    body = await stats.collect(request.app[CACHE], request.app[SEMANTIC])
    statistics = request.app[STATISTICS]
    try:
        windows = {name: await statistics.window(name) for name in WINDOWS}
        body["windows"] = {
            name: figures(Window, sums.get(ALL, NOTHING), **_percentiles(await statistics.durations(name)))
            for name, sums in windows.items()
        }
        if by:
            body["by"] = Breakdown(dimension=by, window=window, data=_rows(windows[window], by))  # type: ignore[arg-type]  # they are of these
        body["ages"], body["sizes"] = await _histograms(request.app[CACHE])
    except StoreUnavailable:  # the rest of the figures says that Redis is away
        body |= {"windows": {}, "ages": [], "sizes": []}
    return _json(body)


def _by(request: web.Request) -> tuple[str, str]:
    query = request.query
    for field in query:
        if field not in ("by", "window"):
            raise InvalidRequest(f"'{field}' is no parameter of the statistics; use by and window.", param=field)
    by, window = query.get("by", ""), query.get("window", "1h")
    if by not in ("", *_NAMED):
        raise InvalidRequest(f"'by' must be {' or '.join(_NAMED)}.", param="by")
    if window not in WINDOWS:
        raise InvalidRequest(f"'window' must be one of {', '.join(WINDOWS)}.", param="window")
    return by, window


def _rows(sums: Totals, dimension: str) -> list[NamedFigures]:
    """One for each name, the one with the most requests first."""
    rows = [figures(NamedFigures, counts, name=names[1]) for names, counts in sums.items() if names[0] == dimension]
    return sorted(rows, key=lambda row: (-row.requests, row.name))


def _percentiles(found: Mapping[Names, Durations]) -> dict[str, Any]:
    """Seconds to the first byte of hits and misses, and between two tokens of a stream that is computed."""
    nothing = Durations()
    first = {cache: found.get(("first_byte", cache), nothing) for cache in ("hit", "miss")}
    return {"first_byte": FirstByte(**first), "between_tokens": found.get(("token", "miss"), nothing)}


async def _histograms(cache: ExactCache) -> tuple[list[AgeClass], list[SizeClass]]:
    """Entries by age in seconds; shares of them by size in bytes, of a sample."""
    counts = await cache.index.ages(_AGES, time.time())
    ages = [AgeClass(up_to=bound, entries=count) for bound, count in zip((*_AGES, None), counts, strict=True)]
    sizes = await cache.index.sizes(_SAMPLE)
    return ages, [
        SizeClass(up_to=upper, share=_share(sizes, lower, upper))
        for lower, upper in zip((0, *_SIZES), (*_SIZES, None), strict=True)
    ]


def _share(sizes: Sequence[int], lower: int, upper: int | None) -> float:
    inside = sum(lower < size and (upper is None or size <= upper) for size in sizes)
    return round(inside / len(sizes), 4) if sizes else 0.0


async def get_timeline(request: web.Request) -> web.Response:
    """GET /v1/cache/timeline?step=1m&steps=60: the figures of each minute or hour, the oldest first."""
    require_operator(request)
    query = request.query
    for field in query:
        if field not in ("step", "steps", "by"):
            raise InvalidRequest(f"'{field}' is no parameter of the timeline; use step, steps and by.", param=field)
    step = _STEPS.get(query.get("step", "1m"))
    if step is None:
        raise InvalidRequest(f"'step' must be {' or '.join(_STEPS)}.", param="step")
    if not (steps := query.get("steps", "60")).isdecimal() or not 1 <= int(steps) <= _MAX_STEPS:
        raise InvalidRequest(f"'steps' must be a number from 1 to {_MAX_STEPS}.", param="steps")
    if (by := query.get("by", "")) not in ("", *_NAMED):
        raise InvalidRequest(f"'by' must be {' or '.join(_NAMED)}.", param="by")
    last = int(time.time()) // step
    try:
        found = await request.app[STATISTICS].timeline(last - int(steps) + 1, last, step)
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The shared store, which has the statistics, does not answer: {error}.") from error
    points = [
        figures(TimelinePoint, sums.get(ALL, NOTHING), time=begun, by=_rows(sums, by) if by else msgspec.UNSET)
        for begun, sums in found
    ]
    return _json(Timeline(step=step, data=points))


def _json(value: Any) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
