"""Lookups that run, whose answer is still to come, or that may still be judged wrong; and what is counted of them."""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cache.semantic.embedding.encoder import Vector
from cache.semantic.inspection.decisions import WatchedDecision
from cache.semantic.messages import LookupRequest
from cache.semantic.policy.policy import Decision, Evidence

_MOST = 4096
_MAX_SECONDS = 0.05
_TIMES_KEPT = 1000

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """The items that were set last; the oldest are dropped when there are too many."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > _MOST:
            self.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Query:
    """A request, and what was decided of the answer of `entry`.

    Without `evidence` nothing is to be learned: no neighbour could have been served, or the request had a threshold of
    its own, or it was the same question in another spelling, which needs no `decision` and no `vector` either.
    """

    ask: LookupRequest
    entry: str
    vector: Vector | None = None
    evidence: Evidence | None = None
    decision: Decision | None = None
    watched: WatchedDecision | None = None
    time: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""

    @property
    def is_audit(self) -> bool:
        """Whether the upstream is asked although the answer could be served."""
        return self.decision is not None and self.decision.audit


class RunningLookups:
    """Counts running lookups by the key of their request: work in the background yields to them, and their clients may
    leave meanwhile.
    """

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._left: set[str] = set()
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    @contextlib.contextmanager
    def running(self, key: str) -> Iterator[None]:
        self._running[key] += 1
        self._none_runs.clear()
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
                self._left.discard(key)
            if not self._running:
                self._none_runs.set()

    def leave(self, key: str) -> None:
        """The client does not wait for the lookup any more, if it still runs."""
        if key in self._running:
            self._left.add(key)

    def has_left(self, key: str) -> bool:
        return key in self._left

    async def yield_to_lookups(self) -> None:
        """Wait until no lookup runs, for at most 50 ms: under constant load twenty answers a second are learned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_SECONDS):
                await self._none_runs.wait()


class ServiceMetrics:
    """Counts since the start, and the last thousand times of each step, in seconds."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.vetoes: Counter[str] = Counter()
        self.times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_TIMES_KEPT))

    @contextlib.contextmanager
    def timing(self, step: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.times[step].append(time.perf_counter() - began)

    def as_dict(self) -> dict[str, Any]:
        """Times in milliseconds."""
        times = {step: _summary(times) for step, times in self.times.items()}
        return {**self.counts, "vetoed": dict(self.vetoes), "milliseconds": times}


def _summary(times: deque[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {name: round(1000 * ordered[int(share * len(ordered))], 3) for name, share in (("p50", 0.5), ("p99", 0.99))}
