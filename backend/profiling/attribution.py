"""Where the time of a run went: parts that add up to its wall time, and phases that add up to each request's.

The engine's thread is what computes, so a moment counts as what this thread does. While it waits, the moment counts as
what the event loop does then for requests: so a part of the event loop is in the sum only where the engine waited for
it, and the rest of it, which ran beside the engine, stands in a column of its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backend.profiling.instrumentation import BOOKKEEPING, KINDS, WAITING, Recorder, Span
from backend.profiling.replay import RequestRecord

_OF_ENGINE = ("schedule", "prefix lookup", "build inputs", *KINDS, "sampling", "detokenise", BOOKKEEPING)
_OF_LOOP = ("tokenise", "respond", "deliver", "prefix store")
"""Where two of them overlap, the moment counts as the first."""
IDLE, OTHER = "idle", "other"
WAITED_FOR = (*_OF_LOOP, IDLE)
"""Parts in which the engine does not compute."""
PARTS = (*_OF_LOOP, *_OF_ENGINE, IDLE, OTHER)
_PYTHON = ("schedule", "prefix lookup", "build inputs", "detokenise", BOOKKEEPING, OTHER)
_WORDS = {
    "tokenise": "checking, rendering and encoding prompts",
    "respond": "building the parts of answers",
    "deliver": "from the engine's thread to the requests",
    "prefix store": "asking it, and restoring from it",
    "schedule": "choosing the tokens of the next step",
    "prefix lookup": "of KV blocks in the engine's memory",
    "build inputs": "arrays of a step",
    "prefill": "steps with tokens of prompts alone",
    "decode": "steps with one token for each sequence",
    "mixed": "steps with both",
    "sampling": "checking logits, and choosing tokens",
    "detokenise": "tokens to text, and stop strings",
    BOOKKEEPING: "of sequences and blocks",
    IDLE: "nothing to do",
    OTHER: "between steps",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the wall time."""

    name: str
    about: str
    seconds: float
    """In the sum."""
    beside: float
    """Further seconds of it, while the engine computed; not in the sum."""


@dataclass(frozen=True, slots=True)
class Phases:
    """Mean seconds of a request's phases, which add up to its time from arrival to end."""

    tokenise: float
    prefix_store: float
    queue: float
    prefill: float
    """From the first step to the first token."""
    decode: float
    """From the first token to the last."""
    finish: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.tokenise + self.prefix_store + self.queue + self.prefill + self.decode + self.finish


def window_of(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """From the first arrival to the last end."""
    return min(record.arrived for record in records), max(record.ended for record in records)


def parts_of(recorder: Recorder, window: tuple[float, float]) -> list[Part]:
    """The parts of the wall time, which add up to it; those that took no time are left out."""
    own = self_segments(recorder.engine)
    waiting = _clipped(own.pop(WAITING, []), window)
    seconds = {name: _length(_clipped(own.get(name, []), window)) for name in _OF_ENGINE}
    beside = dict.fromkeys(PARTS, 0.0)
    for name in _OF_LOOP:
        theirs = _clipped(_union((s.start, s.end) for s in recorder.loop if s.name == name), window)
        seconds[name] = _length(_intersection(waiting, theirs))
        beside[name] = _length(theirs) - seconds[name]
        waiting = _difference(waiting, theirs)
    seconds[IDLE] = _length(waiting)
    seconds[OTHER] = max(0.0, window[1] - window[0] - sum(seconds.values()))
    return [Part(name, _WORDS[name], seconds[name], beside[name]) for name in PARTS if seconds[name] or beside[name]]


def python_seconds(parts: Iterable[Part]) -> float:
    """Seconds of the engine's thread in Python between the runner's calls."""
    return sum(part.seconds for part in parts if part.name in _PYTHON)


def phases_of(records: Sequence[RequestRecord]) -> Phases:
    """Means over the requests."""
    last = [record.token_times[-1] if record.token_times else record.ended for record in records]
    return Phases(
        statistics.fmean(r.tokenised - r.arrived for r in records),
        statistics.fmean(r.queued - r.tokenised for r in records),
        statistics.fmean(r.started - r.queued for r in records),
        statistics.fmean(r.first_token - r.started for r in records),
        statistics.fmean(end - r.first_token for end, r in zip(last, records, strict=True)),
        statistics.fmean(r.ended - end for end, r in zip(last, records, strict=True)),
    )


Interval = tuple[float, float]


def self_segments(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    """For each name the time in which no span within its own ran; spans nest, as those of one thread do."""
    segments: dict[str, list[Interval]] = {}
    stack: list[Span] = []
    at = 0.0

    def advance(to: float) -> None:
        """The innermost span has had the time until then."""
        nonlocal at
        if stack and to > at:
            segments.setdefault(stack[-1].name, []).append((at, to))
        at = max(at, to)

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while stack and stack[-1].end <= span.start:
            advance(stack[-1].end)
            stack.pop()
        advance(span.start)
        stack.append(span)
    while stack:
        advance(stack[-1].end)
        stack.pop()
    return segments


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _clipped(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    within = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in within if end > start]


def _intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Of two lists of intervals that are in order and apart."""
    common: list[Interval] = []
    first = second = 0
    while first < len(some) and second < len(others):
        start, end = max(some[first][0], others[second][0]), min(some[first][1], others[second][1])
        if end > start:
            common.append((start, end))
        if some[first][1] < others[second][1]:
            first += 1
        else:
            second += 1
    return common


def _difference(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of the first is in none of the others; both in order and apart."""
    edges = [0.0, *(edge for interval in others for edge in interval), float("inf")]
    between = list(zip(edges[::2], edges[1::2], strict=True))
    return _intersection(some, between)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
