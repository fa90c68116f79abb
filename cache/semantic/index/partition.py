"""Where the rows of one partition are: each in `flat`, or in inverted lists that FAISS searches."""

import math
from array import array
from dataclasses import dataclass

import faiss
import numpy as np
import numpy.typing as npt

from cache.semantic.index.table import Floats, Rows, RowTable

_LISTS_OF_ROOT = 4
# Codes that a search compares, as a multiple of the square root of the rows: as many as there are lists, times six.
_SCAN_OF_ROOT = 25.0
_CODE_AND_ROW_BYTES = 8
# An entry of FAISS's hash table from rows to places in lists: node, bucket and what malloc adds.
_PLACE_BYTES = 48


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
