"""Time since the last use, in buckets that grow with it."""

import math

import numpy as np
import numpy.typing as npt

BUCKETS = 44
_STEPS_PER_OCTAVE = 2.4
STEPS_PER_E = _STEPS_PER_OCTAVE / math.log(2.0)

Floats = npt.NDArray[np.float64]

EDGES: Floats = np.concatenate(([0.0], 2.0 ** (np.arange(BUCKETS) / _STEPS_PER_OCTAVE)))
"""Seconds at which the buckets begin, and the end of the last one (three days): float64 [45].

The first has all ages below a second, so a finer clock changes nothing.
"""

MAX_STEPS = 256
"""Above the bucket number of any age without the limit: ages stay below 2**106 seconds."""

WIDTHS: Floats = np.diff(EDGES)
MIDDLES: Floats = (EDGES[1:] + EDGES[:-1]) / 2


def bucket(age: float) -> int:
    """The bucket of an age in seconds; longer ages are in the last one."""
    if age < 1.0:
        return 0
    return min(BUCKETS - 1, 1 + int(STEPS_PER_E * math.log(age)))


def buckets(ages: Floats) -> npt.NDArray[np.int64]:
    """As `bucket`, of arrays."""
    steps = 1 + (STEPS_PER_E * np.log(np.maximum(ages, 1.0))).astype(np.int64)
    return np.where(ages < 1.0, 0, np.minimum(BUCKETS - 1, steps))
