"""Counts and timings of the semantic cache, for GET /v1/cache/stats."""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

_TIMES_KEPT = 1000


class ServiceMetrics:
    """Counts since the start, and the last thousand times of each step."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._vetoes: Counter[str] = Counter()
        self._times: dict[str, deque[float]] = {}

    def count(self, what: str) -> None:
        self._counts[what] += 1

    def count_veto(self, veto: str) -> None:
        self._vetoes[veto] += 1

    @contextlib.contextmanager
    def timing(self, step: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._times.setdefault(step, deque(maxlen=_TIMES_KEPT)).append(time.perf_counter() - began)

    def times(self, step: str) -> list[float]:
        """Seconds that a step took, of the last thousand times."""
        return list(self._times.get(step, ()))

    def as_dict(self) -> dict[str, Any]:
        """Times in milliseconds."""
        return {
            **self._counts,
            "vetoed": dict(self._vetoes),
            "milliseconds": {step: _summary(times) for step, times in self._times.items()},
        }


def _summary(times: deque[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {name: round(1000 * ordered[int(share * len(ordered))], 3) for name, share in (("p50", 0.5), ("p99", 0.99))}
