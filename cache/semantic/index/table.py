"""The vectors, each in one row of 16-bit fixed-point numbers, without holes."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# Components of unit vectors are at most 1. Half-precision floats would be as small and as exact, but NumPy turns
# these into float32 four times as fast.
_SCALE = 32767.0
# Grows and shrinks by as much, so that neither blocks a search for long: 1.5 MiB at 384 dimensions.
_STEP = 2048
# Rows that are scored at once: their float32 values fit in the core's own cache.
_BLOCK = 256


class VectorTable:
    """Rows 0 to len - 1 are all in use. Not thread-safe.

    A stored vector gives cosines that are off by 1e-5 on average, 6e-5 at most, for any unit vectors.
    """

    def __init__(self, dimensions: int) -> None:
        self._dimensions = dimensions
        self._codes = np.zeros((_STEP, dimensions), np.int16)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def bytes(self) -> int:
        return self._codes.nbytes

    def append(self, vector: Floats) -> int:
        """Store a unit vector [d]; returns its row, which is the last one."""
        row = self._used
        if row == len(self._codes):
            self._resize(row + _STEP)
        np.rint(vector * np.float32(_SCALE), out=self._codes[row], casting="unsafe")
        self._used = row + 1
        return row

    def move_last_to(self, row: int) -> None:
        """Removes `row`; the last row takes its place."""
        self._used -= 1
        self._codes[row] = self._codes[self._used]
        if self._used <= len(self._codes) - 2 * _STEP:
            self._resize(self._used + _STEP)

    def vectors(self, rows: Rows) -> Floats:
        """float32 [n, d] of int64 [n]; a copy."""
        return self._codes.take(rows, axis=0).astype(np.float32) / np.float32(_SCALE)

    def cosines(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.int32], vector: Floats) -> Floats:
        """float32 [n]: the cosines of rows [n] to a unit vector [d]."""
        found = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _BLOCK):
            block = self._codes.take(rows[start : start + _BLOCK], axis=0).astype(np.float32)
            np.dot(block, vector, out=found[start : start + _BLOCK])
        found /= np.float32(_SCALE)
        return np.clip(found, -1.0, 1.0, out=found)

    def _resize(self, rows: int) -> None:
        # In place: nothing else refers to this array, since everything handed out is a copy. The C library moves
        # an array of this size by its page table, without copying it.
        self._codes.resize((rows, self._dimensions), refcheck=False)


# How far from 1 the squared length of a unit vector may be.
_TOLERANCE = 1e-3


class NotAUnitVector(ValueError):
    """A vector of another shape, or not of length 1: zero, not normalised, NaN. The message says which."""


def unit_vector(vector: npt.ArrayLike, dimensions: int) -> Floats:
    """`vector` as contiguous float32 [dimensions]. Raises NotAUnitVector."""
    try:
        floats = np.ascontiguousarray(vector, np.float32)
    except (TypeError, ValueError) as error:
        raise NotAUnitVector(f"vector: must be {dimensions} numbers: {error}.") from error
    if floats.shape != (dimensions,):
        raise NotAUnitVector(f"vector: has shape {list(floats.shape)}; this index needs [{dimensions}].")
    squared = float(floats @ floats)
    # Not `abs(...) > tolerance`: a comparison with NaN is False, and NaN must be refused.
    if not abs(squared - 1.0) <= _TOLERANCE:
        raise NotAUnitVector(f"vector: has length {squared**0.5:.4g}; it must be normalised to length 1.")
    return floats
