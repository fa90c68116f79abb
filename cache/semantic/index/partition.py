"""Where the rows of one partition are: each in `flat`, or in inverted lists."""

from array import array
from dataclasses import dataclass

import numpy as np

from cache.semantic.index.lists import InvertedLists
from cache.semantic.index.table import RowTable

_LISTS_OF_ROOT = 4


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

    def lists(self, rows: int) -> int:
        """How many lists a partition of so many rows should have; 0 to compare every vector."""
        return 0 if rows <= self.flat else min(rows, round(_LISTS_OF_ROOT * rows**0.5))


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

    def remove(self, row: int) -> None:
        """Takes a row out of where it is."""
        try:
            self.flat.remove(row)
        except ValueError:
            if self.lists is None:
                raise
            self.lists.remove(np.array([row], np.int64))

    def move_batch(self, table: RowTable, batch: int) -> None:
        """Moves rows of `flat` into the lists if there are `batch` of them."""
        if self.lists is not None and len(self.flat) >= batch:
            rows = np.array(self.flat[-batch:], np.int64)
            self.lists.add(rows, table.vectors(rows))
            del self.flat[-batch:]

    def needs_lists(self, thresholds: Thresholds) -> bool:
        """Whether its lists should be made, made anew, or dissolved."""
        rows = len(self)
        if self.lists is None:
            return rows > max(thresholds.flat, self.patience)
        ideal = min(rows, _LISTS_OF_ROOT * rows**0.5)
        return ideal < self.lists.count / 2 or (ideal > self.lists.count * 2 and rows > self.patience)
