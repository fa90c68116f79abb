"""Counts and timings of the semantic cache, for GET /v1/cache/stats."""

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from typing import Any

_TIMES_KEPT = 1000


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
