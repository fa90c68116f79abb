"""Counts of blocks that wait for their next use, by class and age."""

import operator
from array import array
from bisect import bisect_right
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from prefix_store.eviction.ages import BUCKETS, Floats, buckets

Counts: TypeAlias = "array[int]"
"""Of blocks. Counting one element is as fast as in a list, and NumPy reads it without a copy."""

_FINEST_SECONDS = 0.5
_COARSENESS = 1 / 16


class AgeHistogram:
    """A histogram over the time of the last use. Bins grow with age, so there are a few hundred at most.

    Bin i begins at `_starts[i]` and ends where the next one begins.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._starts: list[float] = []
        self._counts: list[Counts] = []

    @property
    def bins(self) -> int:
        return len(self._starts)

    def add(self, label: int, since: float, blocks: int) -> None:
        """Adds blocks of a class that were last used at `since`, in seconds."""
        if not self._starts or since - self._starts[-1] >= _FINEST_SECONDS:
            self._starts.append(since)
            self._counts.append(array("q", bytes(8 * self._classes)))
        self._bin(since)[label] += blocks

    def remove(self, label: int, since: float, blocks: int) -> None:
        """Removes what was added at `since`."""
        self._bin(since)[label] -= blocks

    def move(self, label: int, other: int, since: float, blocks: int) -> None:
        """Changes the class of what was added at `since`."""
        counts = self._bin(since)
        counts[label] -= blocks
        counts[other] += blocks

    def by_age(self, now: float) -> Floats:
        """How many wait, float64 [classes, BUCKETS]."""
        found = np.zeros((BUCKETS, self._classes))
        if self._starts:
            self._thin(now)
            edges = np.array([*self._starts, now])
            ages = now - (edges[:-1] + edges[1:]) / 2
            counts = np.frombuffer(b"".join(self._counts), np.int64).reshape(-1, self._classes)
            np.add.at(found, buckets(ages), counts.astype(np.float64))
        return found.T

    def _bin(self, since: float) -> Counts:
        return self._counts[max(0, bisect_right(self._starts, since) - 1)]

    def _thin(self, now: float) -> None:
        """Merges bins that are narrow for their age."""
        starts: list[float] = []
        counts: list[Counts] = []
        for (start, end), count in zip(pairwise([*self._starts, now]), self._counts, strict=True):
            if starts and end - starts[-1] <= _COARSENESS * (now - end):
                counts[-1] = array("q", map(operator.add, counts[-1], count))
            else:
                starts.append(start)
                counts.append(count)
        self._starts, self._counts = starts, counts
