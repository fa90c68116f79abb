"""How long a step of so many rows takes, learnt from steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from backend.engine.model_runner import BLOCK_SIZE, ModelRunner, SequenceRows, StepInput, pack

_MOST_ROWS = 2048
_WEIGHT = 1 / 16
"""Of a new measurement in the mean of its size."""
_FINEST = 16
"""Numbers of rows up to this one have a mean each; beyond, those within an eighth of each other share one."""

_INTERPOLATED_EVERY = 16
"""Steps; to interpolate takes as long as all else that is done for a step."""
_PLAIN, _DRAFTED = (1, 32, 8), (32, 8, 2, 16, 4)
_ROUNDS = 4
_SECONDS = 0.8
"""All that the measurement at the start may take, after its first round."""


class StepCosts:
    """Seconds of plain steps and of steps that verify drafts, by the number of rows, relative to each other.

    A machine is slower at times, for all steps alike. So a measurement is divided by what steps took lately compared
    with their means, and only what is left changes the mean of its size: a slow minute does not make the sizes that are
    computed in it look worse than the others. Sizes that were never seen lie on the line through their neighbours.

    The two kinds have means of their own: a plain step of a device is replayed and launched before the tokens of the
    last one are known, one that verifies drafts is neither.

    Args:
        plain: seconds by rows, at least of one row.
        drafted: the same of steps with drafts.
    """

    def __init__(self, plain: Mapping[int, float], drafted: Mapping[int, float]) -> None:
        self._plain = _Means(plain)
        self._drafted = _Means(drafted)
        self._pace = 1.0
        self._recorded = 0

    def record(self, rows: int, seconds: float, *, drafted: bool) -> None:
        """Notes what a step took, one that verified drafts or none."""
        means = self._drafted if drafted else self._plain
        ratio = seconds / (self._pace * means(rows))
        if rows > _MOST_ROWS:
            return
        # A step that took much longer was interrupted, which says little of its rows.
        ratio = min(max(ratio, 0.5), 2.0)
        drift = 1 + _WEIGHT * (ratio - 1)
        self._pace *= drift
        means.change(rows, 1 + _WEIGHT * (ratio / drift - 1))
        self._recorded += 1
        if self._recorded % _INTERPOLATED_EVERY == 0:
            self._plain.interpolate()
            self._drafted.interpolate()

    def plain(self, rows: int) -> float:
        """Seconds of a plain step of so many rows, at today's pace."""
        return self._pace * self._plain(rows)

    def drafted(self, rows: int) -> float:
        """Seconds of a step of so many rows, some of them of drafts, at today's pace."""
        return self._pace * self._drafted(rows)

    def relative(self, rows: int, added: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds of steps with drafts of so many more rows than ``rows``, in multiples of the plain step's."""
        more: npt.NDArray[np.float64] = self._drafted.by_rows[np.minimum(rows + added, _MOST_ROWS)]
        return more / self._plain(rows)


class _Means:
    """Relative seconds by rows, from 0 on; never falling, for fewer rows take no longer than more did."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._measured = dict(measured)
        self.interpolate()

    def __call__(self, rows: int) -> float:
        return float(self.by_rows[min(rows, _MOST_ROWS)])

    def change(self, rows: int, factor: float) -> None:
        """Changes the mean of a size, from the next interpolation on."""
        size = _size(rows)
        self._measured[size] = factor * self._measured.get(size, float(self.by_rows[size]))

    def interpolate(self) -> None:
        """Takes the changes over."""
        sizes = np.array(sorted(self._measured))
        means = np.minimum.accumulate(np.array([self._measured[size] for size in sizes])[::-1])[::-1]
        self.by_rows: npt.NDArray[np.float64] = np.interp(np.arange(_MOST_ROWS + 1), sizes, means)
        if len(sizes) > 1:
            last = sizes[-1]
            slope = (means[-1] - means[0]) / (last - sizes[0])
            self.by_rows[last:] = means[-1] + slope * np.arange(_MOST_ROWS + 1 - last)


def measure(runner: ModelRunner, clock: Callable[[], float] = time.perf_counter) -> StepCosts:
    """Times steps of up to 32 rows, each several times in turn, for a second or so: of one row of each sequence, and of
    one sequence as a draft has them.

    The KV blocks that it writes are never read.
    """
    began = clock()
    plain: dict[int, float] = {}
    drafted: dict[int, float] = {}
    kinds = [(plain, size, _plain_step(size)) for size in _PLAIN if size <= min(runner.num_blocks, runner.max_batch)]
    kinds += [(drafted, size, _drafted_step(size)) for size in _DRAFTED if size <= runner.num_blocks * BLOCK_SIZE]
    for _ in range(_ROUNDS):
        for measured, size, step in kinds:
            started = clock()
            runner.run(step).logits.sum().item()  # waits for a device
            measured[size] = min(measured.get(size, np.inf), clock() - started)
        if clock() - began > _SECONDS:
            break
    return StepCosts(plain, drafted)


def _plain_step(rows: int) -> StepInput:
    return pack([SequenceRows([0], 0, [block]) for block in range(rows)], range(rows))


def _drafted_step(rows: int) -> StepInput:
    return pack([SequenceRows([0] * rows, 0, range(-(-rows // BLOCK_SIZE)))], range(rows))


def _size(rows: int) -> int:
    """The number of rows whose mean one of so many belongs to."""
    if rows <= _FINEST:
        return rows
    width = 1 << (rows.bit_length() - 4)
    return rows // width * width
