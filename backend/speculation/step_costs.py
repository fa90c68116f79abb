"""How long a step of so many rows takes, learnt from steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, pack

_MOST_ROWS = 2048
_WEIGHT = 1 / 16
"""Of a new measurement in the mean of its size."""
_FINEST = 16
"""Numbers of rows up to this one have a mean each; beyond, those within an eighth of each other share one."""

_INTERPOLATED_EVERY = 16
"""Steps; to interpolate takes as long as all else that is done for a step."""
_MEASURED = (1, 32, 8, 2, 16, 4)
_ROUNDS = 4
_SECONDS = 0.8
"""All that the measurement at the start may take, after its first round."""


class StepCosts:
    """Seconds of a step by its number of rows, relative to each other.

    A machine is slower at times, for all steps alike. So a measurement is divided by what steps took lately compared
    with their means, and only what is left changes the mean of its size: a slow minute does not make the sizes that are
    computed in it look worse than the others. Sizes that were never seen lie on the line through their neighbours.

    Args:
        measured: seconds by rows, at least of one row.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._means = dict(measured)
        self._pace = 1.0
        self._recorded = 0
        self._by_rows = self._interpolated()

    def record(self, rows: int, seconds: float) -> None:
        """Notes what a step took."""
        ratio = seconds / self(rows)
        if rows > _MOST_ROWS:
            return
        # A step that took much longer was interrupted, which says little of its rows.
        ratio = min(max(ratio, 0.5), 2.0)
        drift = 1 + _WEIGHT * (ratio - 1)
        self._pace *= drift
        size = _size(rows)
        before = self._means.get(size, float(self._by_rows[size]))
        self._means[size] = before * (1 + _WEIGHT * (ratio / drift - 1))
        self._recorded += 1
        if self._recorded % _INTERPOLATED_EVERY == 0:
            self._by_rows = self._interpolated()

    def __call__(self, rows: int) -> float:
        """Seconds of a step of so many rows, at today's pace."""
        return self._pace * float(self._by_rows[min(rows, _MOST_ROWS)])

    def relative(self, rows: int, added: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds of steps with so many more rows than ``rows``, in multiples of what the step takes without them."""
        more: npt.NDArray[np.float64] = self._by_rows[np.minimum(rows + added, _MOST_ROWS)]
        return more / float(self._by_rows[min(rows, _MOST_ROWS)])

    def _interpolated(self) -> npt.NDArray[np.float64]:
        """Relative seconds by rows, from 0 on; never falling, for fewer rows take no longer than more did."""
        sizes = np.array(sorted(self._means))
        means = np.minimum.accumulate(np.array([self._means[size] for size in sizes])[::-1])[::-1]
        by_rows = np.interp(np.arange(_MOST_ROWS + 1), sizes, means)
        if len(sizes) > 1:
            last = sizes[-1]
            slope = (means[-1] - means[0]) / (last - sizes[0])
            by_rows[last:] = means[-1] + slope * np.arange(_MOST_ROWS + 1 - last)
        return by_rows


def measure(runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> StepCosts:
    """Times steps of one sequence with 1 to 32 rows, each several times in turn, for a second or less.

    The KV blocks that it writes are never read.
    """
    began = clock()
    measured: dict[int, float] = {}
    for _ in range(_ROUNDS):
        for size in (size for size in _MEASURED if size <= runner.num_blocks * BLOCK_SIZE):
            step = pack([SequenceRows([0] * size, 0, range(-(-size // BLOCK_SIZE)))], range(size))
            started = clock()
            runner.run(step).logits.sum().item()  # waits for a device
            measured[size] = min(measured.get(size, np.inf), clock() - started)
        if clock() - began > _SECONDS:
            break
    return StepCosts(measured)


def _size(rows: int) -> int:
    """The number of rows whose mean one of so many belongs to."""
    if rows <= _FINEST:
        return rows
    width = 1 << (rows.bit_length() - 4)
    return rows // width * width
