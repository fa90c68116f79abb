"""Where the rows of one partition are: each in `flat`, or in inverted lists that FAISS searches, which are made in the
background while searches and changes go on.
"""

import ctypes
import logging
import math
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

import faiss
import numpy as np
import numpy.typing as npt

from cache.semantic.index.table import Floats, Rows, RowTable

log = logging.getLogger(__name__)

_LISTS_OF_ROOT = 4
# Codes that a search compares, as a multiple of the square root of the rows: as many as there are lists, times six.
_SCAN_OF_ROOT = 25.0
_CODE_AND_ROW_BYTES = 8
# An entry of FAISS's hash table from rows to places in lists: node, bucket and what malloc adds.
_PLACE_BYTES = 48
# Lloyd iterations and vectors per list; more of either finds no more neighbours.
_ITERATIONS = 8
_VECTORS_PER_LIST = 40
# Rows that are copied while a search waits.
_PIECE = 256
# New lists are used after so many rounds at most: rows may come as fast as they are put in.
_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Numbers of rows at which the search of a partition changes.

    Up to `flat` rows every vector is compared. Beyond, the rows are in about 4·√n inverted lists, made anew whenever
    the partition has grown or shrunk fourfold. `scan` is how many codes a search compares at most; `batch` how many
    rows outside the lists are put into them at once. The defaults are measured, see docs/decisions.
    """

    flat: int = 512
    scan: int = 10000
    batch: int = 64


class InvertedLists:
    """Rows by the centroid nearest to their vector, as 8-bit codes. Not thread-safe.

    For candidates only: cosines come from the table.
    """

    def __init__(self, centroids: Floats, sample: Floats, scan: int) -> None:
        """`centroids` are unit vectors [lists, d]; `sample` [n, d] sets the codes' range of each component.

        A search scans as many of the nearest lists as have `scan` rows on average, or fewer.
        """
        self.count, dimensions = centroids.shape
        self._scan = scan
        self._centroids = centroids
        quantizer = faiss.IndexFlatIP(dimensions)
        quantizer.add(centroids)
        self._index = faiss.IndexIVFScalarQuantizer(
            quantizer, dimensions, self.count, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT, False
        )
        self._index.train(sample)
        self._index.set_direct_map_type(faiss.DirectMap.Hashtable)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @property
    def bytes(self) -> int:
        # Lists grow by doubling: what they hold is, by average, three quarters of what they take.
        held = len(self) * (int(self._index.code_size) + _CODE_AND_ROW_BYTES) * 4 // 3
        return int(held + len(self) * _PLACE_BYTES + 2 * self._centroids.nbytes)

    def add(self, rows: Rows, vectors: Floats) -> None:
        """Adds rows [n] that are not in, with their vectors [n, d]."""
        # FAISS would compare batches of a few dozen one by one, ten times as slow as one product of matrices.
        lists: Rows = (vectors @ self._centroids.T).argmax(axis=1)
        self._index.add_core(len(rows), faiss.swig_ptr(vectors), faiss.swig_ptr(rows), faiss.swig_ptr(lists))

    def remove(self, rows: Rows) -> int:
        """Removes those of rows [n] that are in; returns how many."""
        return int(self._index.remove_ids(faiss.IDSelectorArray(len(rows), faiss.swig_ptr(rows))))

    def search(self, vector: Floats, k: int, only: npt.NDArray[np.uint8] | None = None) -> Rows:
        """About the nearest k rows to a unit vector [d], int64 [≤ k].

        `only` is a bitmap of the rows that may be found, lowest bit first. If the nearest lists have fewer than k of
        these, all lists are searched, which is fast if few rows are allowed.
        """
        kept = max(1, len(self))
        scan = min(self._scan, math.ceil(_SCAN_OF_ROOT * math.sqrt(kept)))
        probes = min(self.count, -(-scan * self.count // kept))
        options = faiss.SearchParametersIVF(nprobe=probes)
        if only is not None:
            options.sel = faiss.IDSelectorBitmap(len(only), faiss.swig_ptr(only))
        rows: Rows = self._index.search(vector[None], k, params=options)[1][0]
        if only is not None and rows[-1] < 0:
            options.nprobe = self.count
            rows = self._index.search(vector[None], k, params=options)[1][0]
        return rows[rows >= 0]


@dataclass(eq=False, slots=True)
class Partition:
    """The rows of one partition; the table has them by its number.

    `patience` is the number of rows up to which lists that could not be made are not tried again.
    """

    name: str
    number: int
    flat: "array[int]"  # array is no generic class at run time before Python 3.12
    lists: InvertedLists | None = None
    patience: int = 0

    def __len__(self) -> int:
        return len(self.flat) + (0 if self.lists is None else len(self.lists))

    def move_batch(self, table: RowTable, batch: int) -> None:
        """Moves rows of `flat` into the lists if there are `batch` of them."""
        if self.lists is not None and len(self.flat) >= batch:
            rows = np.array(self.flat[-batch:], np.int64)
            self.lists.add(rows, table.vectors(rows))
            del self.flat[-batch:]

    def remove(self, row: int) -> None:
        """Takes a row out of where it is."""
        if self.lists is None or not self.lists.remove(np.array([row], np.int64)):
            self.flat.remove(row)

    def needs_lists(self, flat: int) -> bool:
        """Whether its lists should be made, made anew, or dissolved, where up to `flat` rows need none."""
        if len(self) <= self.patience:
            return False
        if self.lists is None:
            return len(self) > flat
        return not self.lists.count / 2 <= ideal_lists(len(self)) <= self.lists.count * 2


def ideal_lists(rows: int) -> float:
    """How many lists so many rows are searched fastest in."""
    return min(rows, _LISTS_OF_ROOT * math.sqrt(rows))


class ListBuilder:
    """Trains new lists and fills them without the lock, which takes seconds; then they replace the old ones.

    `background` has one thread, whose work ends after an iteration of k-means or some rows when `closing` is set. A row
    is found all the time: until the new lists are used, the old ones are complete.
    """

    def __init__(self, table: RowTable, background: Executor, closing: threading.Event, thresholds: Thresholds) -> None:
        self.made: weakref.WeakSet[InvertedLists] = weakref.WeakSet()
        """All lists that there are."""
        self._table = table
        self._finished = threading.Condition(table.lock)
        self._background = background
        self._closing = closing
        self._thresholds = thresholds
        self._changed: dict[Partition, array[int]] = {}
        """Partitions whose lists are being made, or wait for it, with the rows that came or went meanwhile."""

    def note(self, partition: Partition, row: int) -> None:
        """Takes note that a row came into `flat` or left the partition, and moves a batch of `flat` into the lists if
        there is one. The caller holds the lock.
        """
        partition.move_batch(self._table, self._thresholds.batch)
        if partition in self._changed:
            self._changed[partition].append(row)
        else:
            self._check(partition)

    def settle(self, timeout: float) -> bool:
        """Wait until there is nothing to do, at most `timeout` seconds; False if there still is."""
        with self._finished:
            return self._finished.wait_for(lambda: not self._changed, timeout)

    def _check(self, partition: Partition) -> None:
        """Has its lists made if it needs others."""
        if partition.needs_lists(self._thresholds.flat) and not self._closing.is_set():
            self._changed[partition] = array("i")
            self._background.submit(self._work, partition)

    def _work(self, partition: Partition) -> None:
        try:
            self._build(partition)
            trim_heap()
        except Exception:  # FAISS raises several; whatever it is, it costs speed only
            log.exception("no better lists for %d vectors, searching goes on without", len(partition))
            partition.patience = 2 * len(partition)
        with self._finished:
            del self._changed[partition]
            self._check(partition)
            self._finished.notify_all()

    def _build(self, partition: Partition) -> None:
        with self._table.lock:
            rows = self._table.rows_of(partition.number)
            if len(rows) <= self._thresholds.flat:
                partition.flat, partition.lists = array("i", rows.tolist()), None
                return
        count = round(ideal_lists(len(rows)))
        rows = np.random.default_rng(len(rows)).permutation(rows)[: count * _VECTORS_PER_LIST]
        sample = np.concatenate([vectors for _, vectors in self._pieces(partition, rows)])
        if len(sample) < count:  # removed meanwhile
            return
        centroids = spherical_centroids(sample, count, self._closing.is_set)
        if centroids is not None:
            self._fill(partition, InvertedLists(centroids, sample, self._thresholds.scan))

    def _pieces(self, partition: Partition, rows: Rows) -> Iterator[tuple[Rows, Floats]]:
        """Those of the rows that are still the partition's, some at a time, with their vectors."""
        for start in range(0, len(rows), _PIECE):
            with self._table.lock:
                piece = self._table.still_of(partition.number, rows[start : start + _PIECE])
                vectors = self._table.vectors(piece)
            yield piece, vectors
            if self._closing.is_set():
                return

    def _fill(self, partition: Partition, lists: InvertedLists) -> None:
        """Puts all rows into new lists, and lets the partition use them.

        Rows that come or go meanwhile are taken out of the new lists again, and those that are the partition's are put
        in anew, in rounds until there are too few for a batch.
        """
        with self._table.lock:
            self.made.add(lists)
            self._changed[partition] = array("i")
            rows = self._table.rows_of(partition.number)
        for number in range(1, _ROUNDS + 1):
            for piece, vectors in self._pieces(partition, rows):
                lists.add(piece, vectors)
            with self._table.lock:
                if self._closing.is_set():  # the lists may lack rows
                    return
                changed = np.unique(np.array(self._changed[partition], np.int64))
                self._changed[partition] = array("i")
                lists.remove(changed)
                rows = self._table.still_of(partition.number, changed)
                if number == _ROUNDS or len(rows) < self._thresholds.batch:
                    partition.flat = array("i", rows.tolist())
                    # The old ones are kept until the end: they take long to free, and here a search waits.
                    partition.lists, lists = lists, partition.lists
                    partition.patience = 0
                    break
        while len(partition.flat) >= self._thresholds.batch and not self._closing.is_set():
            with self._table.lock:
                partition.move_batch(self._table, self._thresholds.batch)


def spherical_centroids(sample: Floats, count: int, is_over: Callable[[], bool]) -> Floats | None:
    """Unit centroids, float32 [count, d], of unit vectors [n, d], n ≥ count, by k-means on the sphere.

    Calls `is_over` between the iterations; returns None if it is true.
    """
    bounds = {"min_points_per_centroid": 1, "max_points_per_centroid": len(sample)}  # no warning, no sampling
    kmeans = faiss.Kmeans(sample.shape[1], count, niter=1, spherical=True, seed=1, **bounds)
    for _ in range(_ITERATIONS):
        if is_over():
            return None
        kmeans.train(sample, init_centroids=kmeans.centroids)
    centroids: Floats = kmeans.centroids
    return centroids


def trim_heap() -> None:
    """Returns free pages of the heap, below those in use, to the system; takes some dozen milliseconds.

    Does nothing unless the C library is glibc: others return pages by themselves.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
