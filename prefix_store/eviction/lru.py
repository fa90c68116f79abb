"""The reference policy: evicts the tail of the least recently used chain."""

import heapq
from collections.abc import Sequence
from typing import Any

from prefix_store.eviction.access import Access
from prefix_store.eviction.run import Run

_SPARE = 64


class LeastRecentlyUsed:
    """A heap ordered by the number of the last use. An outdated entry is dropped when it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Run[Any]]] = []
        self._places = 0
        self._live = 0

    def on_use(self, path: Sequence[Run[Any]], access: Access) -> None:
        """Does nothing: runs have the order of uses."""

    def on_insert(self, run: Run[Any], blocks: int) -> None:
        """Does nothing."""

    def on_access_end(self, run: Run[Any]) -> None:
        """Does nothing."""

    def on_forget(self, run: Run[Any], blocks: int) -> None:
        """Does nothing."""

    def add(self, run: Run[Any]) -> None:
        self._places += 1
        self._live += 1
        run.place = self._places
        heapq.heappush(self._heap, (run.turn, self._places, run))
        if len(self._heap) > 2 * self._live + _SPARE:
            self._heap = [entry for entry in self._heap if entry[2].place == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, run: Run[Any]) -> None:
        self._live -= 1
        run.place = -1

    def victim(self) -> Run[Any] | None:
        while self._heap:
            _, place, run = self._heap[0]
            if run.place == place:
                return run
            heapq.heappop(self._heap)
        return None
