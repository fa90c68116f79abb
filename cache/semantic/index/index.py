"""The index: entries by partition, found by cosine, with expiry."""

import itertools
import sys
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np

from cache.semantic.index.partition import ListBuilder, Partition, Thresholds
from cache.semantic.index.recall import RecallWatch
from cache.semantic.index.table import Floats, Rows, RowTable

# Candidates beyond those requested: 8-bit codes put nearly equal neighbours into a wrong order.
_MARGIN = 16
# What Python takes beside the table, the lists and the dicts: of an entry its row in the dict and in an array and an id
# (a namespace of 20 characters, a dot and 32 digits), of a partition its object, its array and a name of 40 characters.
# CPython 3.11.
_ENTRY_BYTES = 146
_PARTITION_BYTES = 540


class VectorIndex:
    """Unit vectors [d] by partition, in memory, with exact cosines of the results.

    One lock guards everything. A call holds it throughout, a search for some milliseconds, so call from one
    thread that is not an event loop's; the index's own thread holds it for some rows at a time. A search sees
    every entry that was added before, and none that was removed.

    Vectors are kept as 16-bit fixed-point numbers, which moves a cosine by 6e-5 at most. In a partition of more than
    `thresholds.flat` entries some neighbours are missed: about 1 % of the sixteen nearest. Of the searches there
    `compared_share` are compared with exact ones, while that takes no more than `compared_load` of one core.
    """

    def __init__(
        self,
        dimensions: int,
        thresholds: Thresholds = Thresholds(),  # noqa: B008  # frozen
        compared_share: float = 0.01,
        compared_load: float = 0.01,
    ) -> None:
        faiss.omp_set_num_threads(1)
        self._table = RowTable(dimensions)
        self._partitions: dict[str, Partition] = {}
        self._by_number: dict[int, Partition] = {}
        self._numbers = itertools.count(1)
        self._row_of: dict[str, int] = {}
        self._closing = threading.Event()
        # FAISS keeps its number of threads for each thread.
        self._background = ThreadPoolExecutor(1, "semantic-index", faiss.omp_set_num_threads, (1,))
        self._builder = ListBuilder(self._table, self._background, self._closing, thresholds)
        self.recall = RecallWatch(self._table, self._background, self._closing, compared_share, compared_load)

    def __len__(self) -> int:
        """Entries, with expired ones that were not removed yet."""
        return len(self._row_of)

    @property
    def partitions(self) -> int:
        return len(self._partitions)

    def unlisted(self, partition: str) -> int:
        """How many entries of a partition are in no lists, so that a search compares each."""
        found = self._partitions.get(partition)
        return 0 if found is None else len(found.flat)

    @property
    def bytes(self) -> int:
        """The memory that entries and partitions take, ids and names of usual lengths included."""
        with self._table.lock:
            lists = sum(lists.bytes for lists in self._builder.made)
            dicts = sum(map(sys.getsizeof, (self._row_of, self._partitions, self._by_number)))
            objects = _ENTRY_BYTES * len(self) + _PARTITION_BYTES * self.partitions
            return lists + dicts + objects + self._table.bytes

    def add(self, partition: str, entry: str, vector: Floats, expires: float) -> None:
        """Adds an entry, a unit vector [d], to a partition until `expires`, Unix seconds.

        An entry of this id is replaced, also if it was in another partition.
        """
        with self._table.lock:
            self.remove(entry)
            owner = self._partitions.get(partition)
            if owner is None:
                owner = Partition(partition, next(self._numbers), array("i"))
                self._partitions[partition] = self._by_number[owner.number] = owner
            row = self._row_of[entry] = self._table.add(entry, owner.number, vector, expires)
            owner.flat.append(row)
            self._builder.note(owner, row)

    def remove(self, entry: str) -> bool:
        """Removes an entry; False if there is none."""
        with self._table.lock:
            row = self._row_of.pop(entry, None)
            if row is None:
                return False
            owner = self._by_number[self._table.remove(row)]
            owner.remove(row)
            self._builder.note(owner, row)
            if len(owner) == 0:
                del self._partitions[owner.name], self._by_number[owner.number]
            return True

    def search(self, partition: str, vector: Floats, k: int, now: float) -> list[tuple[str, float]]:
        """The k entries of the partition nearest to a unit vector [d], with descending cosines.

        None that expires by `now`, Unix seconds.
        """
        with self._table.lock:
            searched = self._partitions.get(partition)
            if searched is None:
                return []
            rows = self._candidates(searched, vector, k, now)
            cosines = self._table.cosines(rows, vector)
            nearest = np.argsort(-cosines, kind="stable")[:k]
            if searched.lists is not None:  # else every row was compared
                self.recall.offer(searched.number, vector, float(cosines.max(initial=-1.0)), now)
            return [(self._table.entries[rows[i]], float(cosines[i])) for i in nearest.tolist()]

    def settle(self, timeout: float) -> bool:
        """Waits until all lists are made, at most `timeout` seconds; False if they are not."""
        return self._builder.settle(timeout)

    def close(self) -> None:
        """End the background thread. The index can still be searched and changed."""
        self._closing.set()
        self._background.shutdown(cancel_futures=True)

    def _candidates(self, partition: Partition, vector: Floats, k: int, now: float) -> Rows:
        """Rows among which the k nearest are, without any that has expired."""
        flat = self._table.alive(np.array(partition.flat, np.int64), now)
        if partition.lists is None:
            return flat
        rows = partition.lists.search(vector, k + _MARGIN)
        alive = self._table.alive(rows, now)
        if len(rows) - len(alive) > _MARGIN // 2:
            # Too many of the nearest have expired: search the others only.
            alive = partition.lists.search(vector, k + _MARGIN, self._table.alive_bitmap(now))
        return np.concatenate([flat, alive])
