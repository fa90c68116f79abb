"""Makes the lists of large partitions and moves rows into them, in the background."""

import ctypes
import logging
import threading
from collections.abc import Callable

import faiss
import numpy as np

from cache.semantic.index.lists import VECTORS_PER_LIST, InvertedLists, spherical_centroids
from cache.semantic.index.partition import Partition, Thresholds
from cache.semantic.index.rows import RowStore
from cache.semantic.index.table import Floats, Rows

log = logging.getLogger(__name__)

# Enough to know the range of each component.
_MIN_SAMPLE = 4096
# Rows that are copied while a search waits.
_PIECE = 256
_PAUSE_AFTER_FAILURE = 1.0
# Rows that move into growing lists between two calls of `trim_heap`.
_CHURN = 65_536


class ListBuilder:
    """Two threads: one trains new lists and takes seconds for it, one moves rows and takes the lock often and briefly.

    Shared state changes under `lock` only, the lock of the index; k-means and the choice of lists run without it. A row
    is found all the time, since it is always in exactly one place, and a search looks into all of them.
    """

    def __init__(self, rows: RowStore, lock: threading.Lock, thresholds: Thresholds) -> None:
        self._rows = rows
        self._thresholds = thresholds
        self._changed = threading.Condition(lock)
        self._to_make: dict[Partition, None] = {}
        self._to_move: dict[Partition, None] = {}
        self._with_lists: set[Partition] = set()
        self._at_work = 0
        self._churn = 0
        self._closing = False
        jobs = (("train", self._to_make, self._make), ("move", self._to_move, self._move))
        self._threads = [
            threading.Thread(target=self._work, args=(queue, job), name=f"semantic-index-{name}", daemon=True)
            for name, queue, job in jobs
        ]
        for thread in self._threads:
            thread.start()

    def schedule(self, partition: Partition) -> None:
        """Checks whether its rows are where they should be; wakes a thread if not. The caller holds the lock."""
        if partition.needs_moves(self._thresholds):
            self._want(self._to_move, partition)
        if partition.needs_lists(self._thresholds):
            self._want(self._to_make, partition)

    def lists(self) -> list[InvertedLists]:
        """All that are in use; small partitions have none."""
        return [lists for partition in list(self._with_lists) for lists in partition.in_use]

    def forget(self, partition: Partition) -> None:
        """Forgets it. The caller holds the lock."""
        self._with_lists.discard(partition)

    def settle(self, timeout: float) -> bool:
        """Wait until there is nothing to do, at most `timeout` seconds; False if there still is."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._to_make or self._to_move or self._at_work) or self._closing, timeout
            )

    def close(self) -> None:
        """End the threads; waits for what cannot be interrupted, one iteration of k-means at most."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _want(self, queue: dict[Partition, None], partition: Partition) -> None:
        if partition not in queue:
            queue[partition] = None
            self._changed.notify_all()

    def _work(self, queue: dict[Partition, None], job: Callable[[Partition], None]) -> None:
        # FAISS keeps this number for each thread.
        faiss.omp_set_num_threads(1)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or queue)
                if self._closing:
                    return
                partition = next(iter(queue))
                del queue[partition]
                self._at_work += 1
            try:
                job(partition)
            except (MemoryError, RuntimeError) as error:  # FAISS's own errors are RuntimeErrors
                self._give_up(partition, error)
            finally:
                with self._changed:
                    self._at_work -= 1
                    self.schedule(partition)
                    self._changed.notify_all()

    def _give_up(self, partition: Partition, error: Exception) -> None:
        """A failure only costs speed: goes on without, and tries again later."""
        with self._changed:
            self._rows.moving.clear()
            partition.patience = 2 * len(partition)
            log.error("no better lists for %d vectors, searching goes on without: %s", len(partition), error)
            self._changed.wait_for(lambda: self._closing, _PAUSE_AFTER_FAILURE)

    def _make(self, partition: Partition) -> None:
        with self._changed:
            if not partition.needs_lists(self._thresholds):
                return
            count = self._thresholds.lists(len(partition))
            if count == 0:
                partition.cursor, partition.dissolving = 0, True
                return
            mark = -1 if partition.lists is None or partition.lists.mark != -1 else -2
        sample = self._sample(partition, max(count * VECTORS_PER_LIST, _MIN_SAMPLE))
        if len(sample) < count or not len(sample):
            return
        centroids = sample[:1] if count == 1 else spherical_centroids(sample, count, lambda: self._closing)
        if centroids is None:
            return
        made = InvertedLists(centroids, sample, self._thresholds.scan, mark)
        with self._changed:
            partition.cursor, partition.made_for, partition.next = 0, len(partition), made
            if len(partition):  # else it was removed meanwhile
                self._with_lists.add(partition)

    def _sample(self, partition: Partition, size: int) -> Floats:
        """Vectors of up to `size` random rows of the partition, float32 [n, d], copied piece by piece."""
        rows = self.numbers(partition)
        if len(rows) > size:
            rows = np.random.default_rng(len(rows)).choice(rows, size, replace=False)
        pieces = []
        for start in range(0, len(rows), _PIECE):
            with self._changed:
                # Rows may have been removed since, or be another partition's now.
                owners, known = self._rows.owners, len(self._rows)
                piece = [row for row in rows[start : start + _PIECE].tolist() if row < known]
                piece = [row for row in piece if owners[row] is partition]
                pieces.append(self._rows.table.vectors(np.array(piece, np.int64)))
        return np.concatenate(pieces) if pieces else np.empty((0, 0), np.float32)

    def numbers(self, partition: Partition) -> Rows:
        """The rows of the partition, int64 [n]; some may have moved while others were looked up."""
        with self._changed:
            in_use = partition.in_use
            pieces = [np.array(partition.flat, np.int64)]
        for lists in in_use:
            for number in range(lists.count):
                with self._changed:
                    pieces.append(lists.rows(number))
        return np.concatenate(pieces)

    def _move(self, partition: Partition) -> None:
        """Move one batch, so that partitions take turns."""
        unused = None
        with self._changed:
            rows, target = partition.batch(self._thresholds), partition.target
            if not len(rows):
                unused = partition.finish_moves()
                if not partition.in_use:
                    self._with_lists.discard(partition)
            elif partition.dissolving:
                self._rows.move_to_flat(rows)
            else:
                vectors = self._rows.table.vectors(rows)
                self._rows.moving.update(rows.tolist())
        # Old lists take long to free: not while a search waits.
        self._churn = _CHURN if unused is not None else self._churn + len(rows)
        del unused
        if self._churn >= _CHURN:
            self._churn = 0
            trim_heap()
        if not self._rows.moving or target is None:
            return
        numbers = target.lists_of(vectors)
        with self._changed:
            self._rows.move_into(target, rows, vectors, numbers)


def trim_heap() -> None:
    """Returns free pages of the heap to the system; takes milliseconds, a few dozen after much churn.

    Does nothing unless the C library is glibc: others return pages by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
