"""Inverted lists of one large partition: FAISS finds candidates among them, by 8-bit codes of the vectors."""

import math
from collections.abc import Callable

import faiss
import numpy as np
import numpy.typing as npt

from cache.semantic.index.table import Floats, Rows

# Lloyd iterations and vectors per list; more of either finds no more neighbours.
_ITERATIONS = 8
VECTORS_PER_LIST = 40
# Codes that a search compares, as a multiple of the square root of the rows: as many as there are lists, times six.
_SCAN_OF_ROOT = 25.0
_CODE_AND_ROW_BYTES = 8
# An entry of FAISS's hash table from rows to places in lists: node, bucket and what malloc adds.
_PLACE_BYTES = 48


def spherical_centroids(sample: Floats, count: int, is_over: Callable[[], bool]) -> Floats | None:
    """Unit centroids, float32 [count, d], of unit vectors [n, d], n ≥ count, by k-means on the sphere.

    Calls `is_over` between the iterations; returns None if it is true.
    """
    clustering = faiss.Clustering(sample.shape[1], count)
    clustering.niter = 1
    clustering.spherical = True
    clustering.seed = 1
    clustering.min_points_per_centroid = 1
    clustering.max_points_per_centroid = len(sample)
    for _ in range(_ITERATIONS):
        if is_over():
            return None
        # Continues from its own last centroids.
        clustering.train(sample, faiss.IndexFlatIP(sample.shape[1]))
    centroids: Floats = faiss.vector_to_array(clustering.centroids).reshape(count, -1)
    return centroids


class InvertedLists:
    """Rows by the centroid nearest to their vector. Not thread-safe.

    For candidates only: cosines come from the table.
    """

    def __init__(self, centroids: Floats, sample: Floats, scan: int) -> None:
        """`centroids` are unit vectors [lists, d]; `sample` [n, d] sets the codes' range of each component.

        A search scans as many of the nearest lists as have `scan` rows on average, or fewer.
        """
        self.count, dimensions = centroids.shape
        self._scan = scan
        self._centroids = centroids
        self._quantizer = faiss.IndexFlatIP(dimensions)
        self._quantizer.add(centroids)
        self._index = faiss.IndexIVFScalarQuantizer(
            self._quantizer,
            dimensions,
            self.count,
            faiss.ScalarQuantizer.QT_8bit,
            faiss.METRIC_INNER_PRODUCT,
            False,
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
        """Adds new rows [n], with their vectors [n, d]."""
        # FAISS would compare batches of a few dozen one by one, ten times as slow as one product of matrices.
        lists: Rows = (vectors @ self._centroids.T).argmax(axis=1)
        self._index.add_core(len(rows), faiss.swig_ptr(vectors), faiss.swig_ptr(rows), faiss.swig_ptr(lists))

    def remove(self, rows: Rows) -> None:
        """Removes rows [n]; all must be in."""
        self._index.remove_ids(faiss.IDSelectorArray(len(rows), faiss.swig_ptr(rows)))

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
        rows = self._search(vector, k, options)
        if only is not None and len(rows) < k and probes < self.count:
            options.nprobe = self.count
            rows = self._search(vector, k, options)
        return rows

    def _search(self, vector: Floats, k: int, options: faiss.SearchParametersIVF) -> Rows:
        rows: Rows = self._index.search(vector[None], k, params=options)[1][0]
        return rows[rows >= 0]
