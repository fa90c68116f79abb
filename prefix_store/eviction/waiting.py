"""Blocks that wait for their next use, by class and by how long they have."""

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from prefix_store.eviction.ages import BUCKETS, Floats, bucket

_FINEST_SECONDS = 0.5
_COARSENESS = 1 / 16


class Waiting:
    """A histogram over the time of the last use. Bins grow with age, so there are some hundreds however long it runs.

    Bin i begins at `_starts[i]` and ends where the next one begins.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._starts: list[float] = []
        self._counts: list[list[int]] = []

    @property
    def bins(self) -> int:
        return len(self._starts)

    def add(self, label: int, since: float, blocks: int) -> None:
        """Blocks of a class were used at `since`, in seconds, and wait from then on."""
        if not self._starts or since - self._starts[-1] >= _FINEST_SECONDS:
            self._starts.append(since)
            self._counts.append([0] * self._classes)
        self._bin(since)[label] += blocks

    def remove(self, label: int, since: float, blocks: int) -> None:
        """Take back what was added at `since`."""
        self._bin(since)[label] -= blocks

    def move(self, label: int, other: int, since: float, blocks: int) -> None:
        """Give another class to what was added at `since`."""
        counts = self._bin(since)
        counts[label] -= blocks
        counts[other] += blocks

    def by_age(self, now: float) -> Floats:
        """How many wait, float64 [classes, BUCKETS]."""
        found = np.zeros((BUCKETS, self._classes))
        if self._starts:
            self._thin(now)
            buckets = [bucket(now - (start + end) / 2) for start, end in pairwise([*self._starts, now])]
            np.add.at(found, buckets, np.array(self._counts, dtype=np.float64))
        return found.T

    def _bin(self, since: float) -> list[int]:
        return self._counts[max(0, bisect_right(self._starts, since) - 1)]

    def _thin(self, now: float) -> None:
        """Joins neighbours that are narrow for their age."""
        starts: list[float] = []
        counts: list[list[int]] = []
        for (start, end), count in zip(pairwise([*self._starts, now]), self._counts, strict=True):
            if starts and end - starts[-1] <= _COARSENESS * (now - end):
                counts[-1] = [one + other for one, other in zip(counts[-1], count, strict=True)]
            else:
                starts.append(start)
                counts.append(count)
        self._starts, self._counts = starts, counts
