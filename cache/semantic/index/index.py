"""The index: entries by partition, found by cosine, with expiry."""

import math
import sys
import threading
from array import array

import faiss
import numpy as np
import numpy.typing as npt

from cache.semantic.index.list_builder import ListBuilder
from cache.semantic.index.partition import Partition, Thresholds
from cache.semantic.index.recall import Comparing, RecallWatch
from cache.semantic.index.rows import RowStore
from cache.semantic.index.table import Floats, Rows, unit_vector

# Candidates beyond those requested: 8-bit codes put nearly equal neighbours into a wrong order.
_MARGIN = 16
# What Python takes beside the columns: the row number in the dict of entries, and for a partition its object, its
# array with what malloc adds, and the slot in the dict. CPython 3.11; tests compare with what the process takes.
_NUMBER_BYTES = 32
# With half of the 16 bytes to which malloc rounds up.
_STRING_BYTES = 57
_PARTITION_BYTES = 300
# The entry's and the partition's reference, the place and the time; lists and arrays have an eighth in reserve at most.
_COLUMN_BYTES = 31


class VectorIndex:
    """Unit vectors [d] by partition, in memory, with exact cosines of the results.

    One lock guards everything. A call holds it throughout, a search for some milliseconds, so call from one
    thread that is not an event loop's; the index's own threads hold it for a batch of rows at a time. A search sees
    every entry that was added before, and none that was removed.

    Vectors are kept as 16-bit fixed-point numbers, which moves a cosine by 6e-5 at most. In a partition of more than
    `thresholds.one_list` entries some neighbours are missed: about 1 % of the sixteen nearest.
    """

    def __init__(
        self,
        dimensions: int,
        thresholds: Thresholds = Thresholds(),  # noqa: B008  # frozen
        comparing: Comparing = Comparing(),  # noqa: B008  # frozen
    ) -> None:
        self.dimensions = dimensions
        faiss.omp_set_num_threads(1)
        self._lock = threading.Lock()
        self._store = RowStore(dimensions)
        self._partitions: dict[str, Partition] = {}
        self._row_of: dict[str, int] = {}
        self._name_bytes = 0
        self._builder = ListBuilder(self._store, self._lock, thresholds)
        self.recall = RecallWatch(self._store, self._lock, self._builder.numbers, comparing)

    def __len__(self) -> int:
        """Entries, with expired ones that were not removed yet."""
        return len(self._row_of)

    def __contains__(self, entry: str) -> bool:
        return entry in self._row_of

    @property
    def partitions(self) -> int:
        return len(self._partitions)

    @property
    def bytes(self) -> int:
        """The memory that entries and partitions take, ids and names included."""
        lists = sum(lists.bytes for lists in self._builder.lists())
        columns = self._store.table.bytes + _COLUMN_BYTES * len(self)
        entries = sys.getsizeof(self._row_of) + _NUMBER_BYTES * len(self) + 4 * len(self)
        partitions = sys.getsizeof(self._partitions) + _PARTITION_BYTES * self.partitions
        return lists + columns + entries + partitions + self._name_bytes

    def add(self, partition: str, entry: str, vector: npt.ArrayLike, expires: float) -> None:
        """Adds an entry to a partition until `expires`, Unix seconds.

        An entry of this id is replaced, also if it was in another partition. Raises NotAUnitVector unless `vector` is
        [d] and of length 1, and ValueError unless `expires` is a finite number; then nothing has changed.
        """
        unit = unit_vector(vector, self.dimensions)
        if not math.isfinite(expires):
            raise ValueError(f"expires: {expires}; it must be a finite number of Unix seconds.")
        with self._lock:
            self._remove(entry)
            owner = self._partitions.get(partition)
            if owner is None:
                owner = self._partitions[partition] = Partition(partition, array("i"))
                self._name_bytes += _STRING_BYTES + len(partition)
            self._row_of[entry] = self._store.append(entry, owner, unit, expires)
            self._name_bytes += _STRING_BYTES + len(entry)
            self._builder.schedule(owner)

    def remove(self, entry: str) -> bool:
        """Removes an entry; False if there is none."""
        with self._lock:
            return self._remove(entry)

    def search(self, partition: str, vector: npt.ArrayLike, k: int, now: float) -> list[tuple[str, float]]:
        """The k entries of the partition nearest to a unit vector [d], with descending cosines.

        None that expires by `now`, Unix seconds. Raises NotAUnitVector as `add` does, and ValueError if k < 1.
        """
        unit = unit_vector(vector, self.dimensions)
        if k < 1:
            raise ValueError(f"k: {k}; it must be at least 1.")
        with self._lock:
            searched = self._partitions.get(partition)
            if searched is None:
                return []
            rows = self._candidates(searched, unit, k, now)
            cosines = self._store.table.cosines(rows, unit)
            nearest = np.argsort(-cosines, kind="stable")[:k]
            entries = self._store.entries
            self.recall.offer(searched, unit, float(cosines[nearest[0]]) if len(nearest) else -1.0, now)
            return [(entries[rows[i]], float(cosines[i])) for i in nearest.tolist()]

    def settle(self, timeout: float) -> bool:
        """Waits until all rows are in their final places, at most `timeout` seconds; False if they are not."""
        return self._builder.settle(timeout)

    def close(self) -> None:
        """End the background threads. The index can still be searched."""
        self._builder.close()
        self.recall.close()

    def _remove(self, entry: str) -> bool:
        row = self._row_of.pop(entry, None)
        if row is None:
            return False
        owner = self._store.owners[row]
        renumbered = self._store.remove(row)
        if renumbered is not None:
            self._row_of[renumbered] = row
        self._name_bytes -= _STRING_BYTES + len(entry)
        if len(owner) == 0:
            del self._partitions[owner.name]
            self._builder.forget(owner)
            self._name_bytes -= _STRING_BYTES + len(owner.name)
        self._builder.schedule(owner)
        return True

    def _candidates(self, partition: Partition, vector: Floats, k: int, now: float) -> Rows:
        """Rows among which the k nearest are, without any that has expired."""
        rows = np.array(partition.flat, np.int64)
        found = [rows[self._lives(rows, now)]]
        for lists in partition.in_use:
            rows = lists.search(vector, k + _MARGIN)
            living = rows[self._lives(rows, now)]
            if len(rows) - len(living) > _MARGIN // 2:
                # Too many of the nearest have expired: search the others only.
                bitmap = np.packbits(np.frombuffer(self._store.times) > now, bitorder="little")
                living = lists.search(vector, k + _MARGIN, bitmap)
            found.append(living)
        return np.concatenate(found)

    def _lives(self, rows: Rows, now: float) -> npt.NDArray[np.bool_]:
        living: npt.NDArray[np.bool_] = np.frombuffer(self._store.times)[rows] > now
        return living
