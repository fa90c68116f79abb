"""Makes the lists of large partitions in the background, while searches and changes go on."""

import ctypes
import logging
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator

import faiss
import numpy as np

from cache.semantic.index.lists import VECTORS_PER_LIST, InvertedLists, spherical_centroids
from cache.semantic.index.partition import Partition, Thresholds
from cache.semantic.index.table import Floats, Rows, RowTable

log = logging.getLogger(__name__)

# Enough to know the range of each component.
_MIN_SAMPLE = 4096
# Rows that are copied while a search waits.
_PIECE = 256
# New lists are used when they lack no more rows than these, or after so many rounds: rows may come as fast as they are
# put in.
_FEW = 1024
_ROUNDS = 6


class ListBuilder:
    """Trains new lists and fills them without the lock, which takes seconds; then they replace the old ones.

    `lock` is that of the index, `run` lets a function run in its background thread. A row is found all the time: until
    the new lists are used, the old ones are complete.
    """

    def __init__(
        self,
        table: RowTable,
        lock: threading.Lock,
        run: Callable[[Callable[[], None]], object],
        thresholds: Thresholds,
    ) -> None:
        self.made: weakref.WeakSet[InvertedLists] = weakref.WeakSet()
        """All lists that there are."""
        self._table = table
        self._changed = threading.Condition(lock)
        self._run = run
        self._thresholds = thresholds
        self._waiting: set[Partition] = set()
        self._closing = False

    def check(self, partition: Partition) -> None:
        """Has its lists made if it needs others. The caller holds the lock."""
        if partition not in self._waiting and not self._closing and partition.needs_lists(self._thresholds):
            self._waiting.add(partition)
            self._run(lambda: self._work(partition))

    def settle(self, timeout: float) -> bool:
        """Wait until there is nothing to do, at most `timeout` seconds; False if there still is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def close(self) -> None:
        """What runs ends after an iteration of k-means or some rows."""
        self._closing = True

    def _work(self, partition: Partition) -> None:
        faiss.omp_set_num_threads(1)  # FAISS keeps this number for each thread
        try:
            self._build(partition)
        except Exception:  # FAISS raises several; whatever it is, it costs speed only
            log.exception("no better lists for %d vectors, searching goes on without", len(partition))
            partition.patience = 2 * len(partition)
        with self._changed:
            self._waiting.discard(partition)
            self.check(partition)
            self._changed.notify_all()

    def _build(self, partition: Partition) -> None:
        with self._changed:
            rows = self._table.rows_of(partition.number)
            count = self._thresholds.lists(len(rows))
            if count == 0:
                partition.flat, partition.lists = array("i", rows.tolist()), None
                return
        sample = self._sample(partition, rows, max(count * VECTORS_PER_LIST, _MIN_SAMPLE))
        if len(sample) < count:  # removed meanwhile
            return
        centroids = spherical_centroids(sample, count, lambda: self._closing)
        if centroids is None:
            return
        lists = InvertedLists(centroids, sample, self._thresholds.scan)
        with self._changed:
            self.made.add(lists)
        self._fill(partition, lists)
        trim_heap()

    def _sample(self, partition: Partition, rows: Rows, size: int) -> Floats:
        """Vectors of up to `size` random ones of the rows, float32 [n, d]."""
        if len(rows) > size:
            rows = np.random.default_rng(len(rows)).choice(rows, size, replace=False)
        pieces = [vectors for _, _, vectors in self._pieces(partition, rows)]
        return np.concatenate(pieces) if pieces else np.empty((0, 0), np.float32)

    def _pieces(self, partition: Partition, rows: Rows) -> Iterator[tuple[Rows, Rows, Floats]]:
        """Those of the rows that are still the partition's, some at a time, with their stamps and vectors."""
        for start in range(0, len(rows), _PIECE):
            if self._closing:
                return
            with self._changed:
                piece = self._table.still_of(partition.number, rows[start : start + _PIECE])
                stamps, vectors = self._table.stamps(piece), self._table.vectors(piece)
            yield piece, stamps, vectors

    def _fill(self, partition: Partition, lists: InvertedLists) -> None:
        """Puts all rows into new lists, in rounds since rows come and go meanwhile, and lets the partition use them."""
        rows = stamps = np.empty(0, np.int64)  # what the lists have
        for number in range(_ROUNDS + 1):
            with self._changed:
                current = self._table.stamps(rows) == stamps
                has = np.zeros(len(self._table), np.bool_)
                has[rows[current]] = True
                wanted = self._table.rows_of(partition.number)
                missing = wanted[~has[wanted]]
                if number == _ROUNDS or len(missing) <= _FEW:
                    lists.remove(rows[~current])
                    partition.flat = array("i", missing.tolist())
                    # The old ones are kept until the end: they take long to free, and here a search waits.
                    partition.lists, lists = lists, partition.lists
                    break
            lists.remove(rows[~current])
            kept = [(rows[current], stamps[current])]
            for piece, its_stamps, vectors in self._pieces(partition, missing):
                lists.add(piece, vectors)
                kept.append((piece, its_stamps))
            rows, stamps = (np.concatenate(columns) for columns in zip(*kept, strict=True))
        while len(partition.flat) >= self._thresholds.batch and not self._closing:
            with self._changed:
                partition.move_batch(self._table, self._thresholds.batch)


def trim_heap() -> None:
    """Returns free pages of the heap, below those in use, to the system; takes some dozen milliseconds.

    Does nothing unless the C library is glibc: others return pages by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
