"""How often the first result of a search is the nearest of all: some searches are compared with an exact one."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cache.semantic.index.partition import Partition
from cache.semantic.index.rows import RowStore
from cache.semantic.index.table import Floats, Rows

# Rows that are compared while a search waits: half a millisecond.
_PIECE = 1024
# Between two pieces. A lock that is released and taken at once is not given to a search that waits for it.
_PAUSE = 0.0005
_OUTCOMES_KEPT = 1000
# Of cosines of the same stored vectors, in batches of other sizes.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Comparing:
    """`share` of the searches are compared, while that takes no more than `load` of one core."""

    share: float = 0.01
    load: float = 0.01


@dataclass(frozen=True, slots=True)
class _Search:
    """A search at the time `now`, and the highest cosine that it has found, -1 for none."""

    partition: Partition
    vector: Floats
    first: float
    now: float


class RecallWatch:
    """A thread that compares one search at a time with all rows of its partition; others meanwhile are not compared.

    It takes `lock`, that of the index, for some rows at a time. Rows that change places meanwhile may be missed, which
    makes recall look better only if one of them was the nearest.
    """

    def __init__(
        self, rows: RowStore, lock: threading.Lock, numbers: Callable[[Partition], Rows], comparing: Comparing
    ) -> None:
        self._rows = rows
        self._numbers = numbers
        self._comparing = comparing
        self._changed = threading.Condition(lock)
        self._search: _Search | None = None
        self._free_at = 0.0
        self._closing = False
        self._outcomes: deque[bool] = deque(maxlen=_OUTCOMES_KEPT)
        self.compared = 0
        """Searches, so far."""
        self._thread = threading.Thread(target=self._work, name="semantic-index-recall", daemon=True)
        self._thread.start()

    @property
    def at_1(self) -> float | None:
        """Of the last thousand compared searches, the share whose first result was the nearest; None before any."""
        outcomes = list(self._outcomes)
        return sum(outcomes) / len(outcomes) if outcomes else None

    def offer(self, partition: Partition, vector: Floats, first: float, now: float) -> None:
        """Maybe compare a search. The caller holds the lock."""
        # Without lists every row was compared.
        is_free = self._search is None and time.monotonic() >= self._free_at
        if partition.in_use and is_free and random.random() < self._comparing.share:  # noqa: S311  # a sample is no secret
            self._search = _Search(partition, vector, first, now)
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread; waits for some rows at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._search is not None)
                search = self._search
            if self._closing or search is None:
                return
            began = time.monotonic()
            highest = self._highest_cosine(search)
            ended = time.monotonic()
            with self._changed:
                if highest is not None:
                    self.compared += 1
                    self._outcomes.append(search.first >= highest - _ROUNDING)
                self._search = None
                self._free_at = ended + (ended - began) * (1 / self._comparing.load - 1)

    def _highest_cosine(self, search: _Search) -> float | None:
        """Of all rows of a partition that live; None if there is none, or the index is being closed."""
        numbers, highest = self._numbers(search.partition), -2.0
        for start in range(0, len(numbers), _PIECE):
            with self._changed:
                if self._closing:
                    return None
                owners, times = self._rows.owners, self._rows.times
                piece = [row for row in numbers[start : start + _PIECE].tolist() if row < len(owners)]
                piece = [row for row in piece if owners[row] is search.partition and times[row] > search.now]
                if piece:
                    cosines = self._rows.table.cosines(np.array(piece, np.int64), search.vector)
                    highest = max(highest, float(cosines.max()))
            time.sleep(_PAUSE)
        return highest if highest >= -1 else None
