"""Chooses one form for each part within a budget: multiple-choice knapsack by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backend.quantized_weights.quantized_linear import CannotQuantize

_MAX_UNITS = 100_000
"""Units in a budget. Finer sizes are rounded up to this resolution, so that the budget still holds."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A form that a part may have."""

    size: int
    """In bits, or the unit of the budget; not negative."""
    loss: float


def least_loss(parts: Sequence[Sequence[Choice]], budget: int) -> list[int]:
    """The choices with the least total loss whose total size is within the budget: an index for each part.

    Raises:
        CannotQuantize: the smallest choices are over the budget.
    """
    smallest = sum(min(choice.size for choice in choices) for choices in parts)
    if smallest > budget:
        raise CannotQuantize(f"the smallest forms take {smallest:,} bits together, and the budget is {budget:,}")
    table = _Table(parts, budget - smallest)
    return table.choices(table.units)


def least_size(parts: Sequence[Sequence[Choice]], budget: float) -> list[int]:
    """The choices with the least total size whose total loss is within the budget: an index for each part.

    Raises:
        CannotQuantize: the choices with the least loss are over the budget.
    """
    table = _Table(parts, sum(max(c.size for c in choices) - min(c.size for c in choices) for choices in parts))
    enough = np.flatnonzero(table.least <= budget)
    if not len(enough):
        least = float(table.least[-1])
        raise CannotQuantize(
            f"the best forms lose {least:.4g} together; expected a budget of that, not of {budget:.4g}"
        )
    return table.choices(int(enough[0]))


class _Table:
    """Least losses for every budget in excess of the smallest choices' total size.

    Args:
        spare: the largest excess.
    """

    def __init__(self, parts: Sequence[Sequence[Choice]], spare: int) -> None:
        smallest = [min(choice.size for choice in choices) for choices in parts]
        beyond = [[choice.size - least for choice in choices] for choices, least in zip(parts, smallest, strict=True)]
        unit = max(math.gcd(*(size for sizes in beyond for size in sizes)), 1)
        if spare // unit > _MAX_UNITS:
            unit = -(-spare // _MAX_UNITS)
        self._sizes = [[-(-size // unit) for size in sizes] for sizes in beyond]
        self.units = min(spare // unit, sum(max(sizes) for sizes in self._sizes))
        self.least = np.zeros(self.units + 1)
        self._chosen: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for choices, sizes in zip(parts, self._sizes, strict=True):
            losses = np.full((len(choices), self.units + 1), np.inf)
            for index, (choice, size) in enumerate(zip(choices, sizes, strict=True)):
                if size <= self.units:
                    losses[index, size:] = self.least[: self.units + 1 - size] + choice.loss
            self._chosen.append(losses.argmin(axis=0))
            self.least = losses.min(axis=0)

    def choices(self, units: int) -> list[int]:
        """Choices of least loss within ``units``."""
        indices = []
        for chosen, sizes in zip(reversed(self._chosen), reversed(self._sizes), strict=True):
            indices.append(int(chosen[units]))
            units -= sizes[indices[-1]]
        return indices[::-1]
