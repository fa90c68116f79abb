"""How often the first result of a search is the nearest of all: some searches are compared with an exact one."""

import random
import threading
import time
from collections import deque
from concurrent.futures import Executor

from cache.semantic.index.table import Floats, RowTable

# Rows that are compared while a search waits: half a millisecond.
_PIECE = 1024
# Between two pieces. A lock that is released and taken at once is not given to a search that waits for it.
_PAUSE = 0.0005
_OUTCOMES_KEPT = 1000
# Of cosines of the same stored vectors, in batches of other sizes.
_ROUNDING = 1e-6


class RecallWatch:
    """Compares one search at a time with all rows of its partition; others meanwhile are not compared.

    `share` of the searches are compared, in `background`, while that takes no more than `load` of one core. It takes
    the lock for some rows at a time, and ends after some rows when `closing` is set. Rows that are removed meanwhile
    are not compared, which makes recall look better only if one of them was the nearest.
    """

    def __init__(
        self, table: RowTable, background: Executor, closing: threading.Event, share: float, load: float
    ) -> None:
        self._table = table
        self._background = background
        self._closing = closing
        self._share = share
        self._load = load
        self._free_at = 0.0
        self._outcomes: deque[bool] = deque(maxlen=_OUTCOMES_KEPT)
        self.compared = 0
        """Searches, so far."""

    @property
    def at_1(self) -> float | None:
        """Of the last thousand compared searches, the share whose first result was the nearest; None before any."""
        outcomes = list(self._outcomes)
        return sum(outcomes) / len(outcomes) if outcomes else None

    def offer(self, owner: int, vector: Floats, first: float, now: float) -> None:
        """Maybe compare a search at the time `now` that found `first` as the highest cosine, -1 for none.

        The caller holds the lock.
        """
        if self._closing.is_set() or time.monotonic() < self._free_at or random.random() >= self._share:  # noqa: S311  # a sample is no secret
            return
        self._free_at = float("inf")
        self._background.submit(self._compare, owner, vector, first, now, self._table.additions)

    def _compare(self, owner: int, vector: Floats, first: float, now: float, latest: int) -> None:
        began = time.monotonic()
        with self._table.lock:
            rows = self._table.rows_of(owner)
        highest = -2.0
        for start in range(0, len(rows), _PIECE):
            with self._table.lock:
                piece = self._table.alive(self._table.still_of(owner, rows[start : start + _PIECE]), now)
                piece = piece[self._table.stamps[piece] <= latest]  # later ones could not be found
                highest = float(self._table.cosines(piece, vector).max(initial=highest))
            if self._closing.wait(_PAUSE):
                return
        if highest >= -1:  # else all have expired
            self._outcomes.append(first >= highest - _ROUNDING)
            self.compared += 1
        self._free_at = began + (time.monotonic() - began) / self._load
