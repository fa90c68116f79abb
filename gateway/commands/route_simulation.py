"""Upstreams that are simulated: what a strategy does with recorded traffic.

Each upstream computes one prompt after the other, at a constant speed and without the tokens of blocks that it holds;
answers follow at a constant speed, and do not slow prompts down. All blocks of a prompt enter its cache when the
request arrives.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.routing.strategy import RouteRequest, Strategy

_NEWEST = 0.2
"""Of the newest value, in the average of an upstream's latencies."""


class Cache(Protocol):
    """The KV cache of an upstream."""

    def use(self, keys: Sequence[int], time: float) -> int:
        """How many leading blocks of a prompt were there; afterwards all are."""


class Arrival(Protocol):
    """A request of a trace."""

    @property
    def time(self) -> float: ...
    @property
    def input_length(self) -> int: ...
    @property
    def output_length(self) -> int: ...
    @property
    def keys(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast an upstream is."""

    prefill: float = 12_000.0
    """Tokens of prompts a second."""
    token: float = 0.02
    """Seconds for each token of an answer."""


class SimulatedUpstream:
    """A `Candidate`, with counts of its work."""

    weight = 1.0

    def __init__(self, name: str, cache: Cache) -> None:
        self.name = name
        self.cache = cache
        self.in_flight = 0
        self.loaded = None
        self.latency = 0.0
        self.requests = 0
        self.computed = 0
        """Tokens of prompts that were not in its cache."""
        self.free_at = 0.0
        """When it has computed all prompts that it was sent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy has done with a trace."""

    block_hits: float
    """The share of blocks that were in the cache of the upstream, with all that come before them."""
    requests: float
    """The most requests of an upstream, in means."""
    computed: float
    """The most computed tokens of an upstream, in means."""
    first_token: tuple[float, float]
    """Seconds until the first token: median, and 99th percentile."""


def simulate(
    arrivals: Iterable[Arrival],
    block_tokens: int,
    strategy: Strategy,
    caches: Sequence[Cache],
    speed: Speed = Speed(),
    rate: float = 1.0,
) -> Outcome:
    """Sends a trace, `rate` times as fast as it was recorded, to an upstream for each cache."""
    upstreams = [SimulatedUpstream(f"upstream {number}", cache) for number, cache in enumerate(caches)]
    events = _Events()
    blocks = hits = 0
    waits: list[float] = []
    for arrival in arrivals:
        now = arrival.time / rate
        events.run_until(now)
        request = RouteRequest("model", tuple(arrival.keys))
        upstream = strategy.order(upstreams, request)[0]
        strategy.sent(upstream, request)
        leading = upstream.cache.use(arrival.keys, now)
        computed = max(0, arrival.input_length - leading * block_tokens)
        upstream.free_at = max(now, upstream.free_at) + computed / speed.prefill
        wait = upstream.free_at - now
        events.begin(upstream, wait, upstream.free_at, upstream.free_at + arrival.output_length * speed.token)
        upstream.requests += 1
        upstream.computed += computed
        blocks += len(arrival.keys)
        hits += leading
        waits.append(wait)
    waits.sort()
    return Outcome(
        hits / blocks if blocks else 0.0,
        _most_in_means([upstream.requests for upstream in upstreams]),
        _most_in_means([upstream.computed for upstream in upstreams]),
        (waits[len(waits) // 2], waits[len(waits) * 99 // 100]) if waits else (0.0, 0.0),
    )


class _Events:
    """Beginnings and ends of answers that are to come."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, SimulatedUpstream, float | None]] = []
        self._numbers = itertools.count()

    def begin(self, upstream: SimulatedUpstream, wait: float, first_token: float, end: float) -> None:
        upstream.in_flight += 1
        heapq.heappush(self._heap, (first_token, next(self._numbers), upstream, wait))
        heapq.heappush(self._heap, (end, next(self._numbers), upstream, None))

    def run_until(self, now: float) -> None:
        while self._heap and self._heap[0][0] <= now:
            _, _, upstream, wait = heapq.heappop(self._heap)
            if wait is None:
                upstream.in_flight -= 1
            else:
                upstream.latency += (wait - upstream.latency) * (_NEWEST if upstream.latency else 1.0)


def _most_in_means(counts: Sequence[int]) -> float:
    total = sum(counts)
    return max(counts) * len(counts) / total if total else 1.0
