"""How long a step of so many rows takes, learnt from steps."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, pack

_SIZES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 192, 256, 384, 512, 1024, 2048)
_WEIGHT = 1 / 16
"""Of a new measurement in the mean of its size."""
_MEASURED = 32
"""Steps of more rows are not tried at the start: drafts are shorter."""
_SECONDS = 1.0
"""All that the start may take."""
_REPEATS = 3


class StepCosts:
    """Seconds of a step by its number of rows, relative to each other.

    A machine is slower at times, for all steps alike. So a measurement is divided by what steps took lately compared
    with their means, and only what is left changes the mean of its size: a slow minute does not make the sizes that are
    computed in it look worse than the others. Sizes that were never seen lie on the line between their neighbours.

    Args:
        measured: seconds by rows, at least of one row.
    """

    def __init__(self, measured: dict[int, float]) -> None:
        sizes = [size for size in _SIZES if size in measured]
        known = np.array([measured[size] for size in sizes])
        # Two points give a slope; with one, or a slope below zero, more rows are taken to cost nothing more.
        self._mean: npt.NDArray[np.float64] = np.interp(_SIZES, sizes, known)
        if len(sizes) > 1:
            slope = max(0.0, (known[-1] - known[0]) / (sizes[-1] - sizes[0]))
            beyond = np.array(_SIZES) > sizes[-1]
            self._mean[beyond] = known[-1] + slope * (np.array(_SIZES)[beyond] - sizes[-1])
        self._pace = 1.0
        self._by_rows = self._interpolate()

    def record(self, rows: int, seconds: float) -> None:
        """Notes what a step took."""
        if not 1 <= rows <= _SIZES[-1]:
            return
        ratio = seconds / self(rows)
        # What takes ten times as long was interrupted, and says nothing of its rows.
        if not 0.1 < ratio < 10.0:
            return
        self._pace += _WEIGHT * (ratio * self._pace - self._pace)
        place = bisect_left(_SIZES, rows)
        if _SIZES[place] == rows:
            self._mean[place] += _WEIGHT * (seconds / self._pace - self._mean[place])
            self._by_rows = self._interpolate()

    def __call__(self, rows: int) -> float:
        """Seconds of a step of so many rows, at today's pace."""
        return self._pace * float(self._by_rows[min(rows, len(self._by_rows) - 1)])

    def relative(self, first: int, last: int) -> npt.NDArray[np.float64]:
        """Of steps of ``first`` to ``last`` rows, in any unit; never falling."""
        return self._by_rows[first : last + 1]

    def _interpolate(self) -> npt.NDArray[np.float64]:
        rising = np.maximum.accumulate(self._mean)
        return np.interp(np.arange(_SIZES[-1] + 1), _SIZES, rising)


def measure(runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> StepCosts:
    """Times steps of one sequence with 1 to 32 rows, for a second at most; one row is always measured.

    The KV blocks that it writes are never read.
    """
    began = clock()
    measured: dict[int, float] = {}
    blocks = range(-(-_MEASURED // BLOCK_SIZE))
    most = min(_MEASURED, runner.num_blocks * BLOCK_SIZE)
    for size in (size for size in _SIZES if size <= most):
        step = pack([SequenceRows([0] * size, 0, blocks[: -(-size // BLOCK_SIZE)])], range(size))
        for _ in range(_REPEATS):
            started = clock()
            runner.run(step).logits.sum().item()  # waits for a device
            measured[size] = min(measured.get(size, np.inf), clock() - started)
            if clock() - began > _SECONDS:
                return StepCosts(measured)
    return StepCosts(measured)
