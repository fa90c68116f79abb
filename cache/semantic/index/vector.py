"""What may be put into the index and searched for: unit vectors, checked once, where they come in."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# How far from 1 the squared length of what an encoder calls a unit vector may be.
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
