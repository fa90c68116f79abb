"""Where the rows of one partition are: each in exactly one of two or three places."""

from array import array
from dataclasses import dataclass

import numpy as np

from cache.semantic.index.lists import InvertedLists
from cache.semantic.index.table import Rows


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Numbers of rows at which the search of a partition changes.

    Up to `flat` rows every vector is compared. Beyond, the rows are in inverted lists: in a single one up to
    `one_list`, and from there in about 4·√n lists, rebuilt whenever the partition has grown or shrunk `change` times.
    `scan` is how many codes a search compares at most; `batch` how many rows move into lists at once, while a search
    waits. The defaults are measured, see docs/decisions.
    """

    flat: int = 512
    one_list: int = 4096
    change: int = 4
    scan: int = 10000
    batch: int = 64

    def __post_init__(self) -> None:
        if not (1 <= self.flat <= self.one_list and self.change >= 2 and self.scan >= 1 and self.batch >= 1):
            raise ValueError(f"{self}: must have 1 <= flat <= one_list, change >= 2, scan >= 1 and batch >= 1.")

    @property
    def loose(self) -> int:
        """How many rows outside the lists of a partition are too many."""
        return max(1, self.flat // 4)

    def lists(self, rows: int) -> int:
        """How many lists a partition of so many rows should have; 0 to compare every vector."""
        if rows <= self.flat:
            return 0
        return 1 if rows <= self.one_list else max(2, min(rows, round(4 * rows**0.5)))


@dataclass(eq=False, slots=True)
class Partition:
    """New rows are in `flat`; when these are many, they move into `lists`.

    `next` are the lists that will follow: rows move there from both others, from `lists` beginning at number `cursor`.
    With `dissolving`, rows move from `lists` back to `flat`. `made_for` is how many rows there were when the lists
    were made, and `patience` the number of rows up to which a failure is not retried.
    """

    name: str
    flat: "array[int]"  # array is no generic class at run time before Python 3.12
    lists: InvertedLists | None = None
    next: InvertedLists | None = None
    cursor: int = 0
    dissolving: bool = False
    made_for: int = 0
    patience: int = 0

    def __len__(self) -> int:
        return len(self.flat) + sum(map(len, self.in_use))

    @property
    def in_use(self) -> tuple[InvertedLists, ...]:
        return tuple(lists for lists in (self.lists, self.next) if lists is not None)

    @property
    def target(self) -> InvertedLists | None:
        """Where rows of `flat` are to move."""
        return self.lists if self.next is None else self.next

    def marked(self, mark: int) -> InvertedLists:
        """The lists of this mark, which are in use."""
        return next(lists for lists in self.in_use if lists.mark == mark)

    def needs_lists(self, thresholds: Thresholds) -> bool:
        """Whether its lists should be made, rebuilt, or dissolved."""
        if self.next is not None or self.dissolving:
            return False
        rows = len(self)
        if self.lists is None:
            return rows > max(thresholds.flat, self.patience)
        if rows * thresholds.change < self.made_for and self.lists.count != thresholds.lists(rows):
            return True
        grown = self.lists.count == 1 or rows > self.made_for * thresholds.change
        return grown and rows > self.patience and thresholds.lists(rows) > self.lists.count

    def needs_moves(self, thresholds: Thresholds) -> bool:
        """Whether rows must move: new ones if they are many, or all, into new lists or out of dissolving ones."""
        if self.next is not None or self.dissolving:
            return True
        return self.lists is not None and len(self.flat) >= thresholds.loose

    def batch(self, thresholds: Thresholds) -> Rows:
        """The rows that should move next, int64 [n ≤ batch]; none if all that must have moved."""
        if not self.dissolving and len(self.flat) >= thresholds.loose:
            return np.array(self.flat[-thresholds.batch :], np.int64)
        if self.lists is not None and (self.next is not None or self.dissolving):
            while self.cursor < self.lists.count:
                rows = self.lists.rows(self.cursor)
                if len(rows):
                    return rows[-thresholds.batch :]
                self.cursor += 1
        return np.empty(0, np.int64)

    def finish_moves(self) -> InvertedLists | None:
        """After the last batch: activate the new lists. Returns the lists that are no longer needed."""
        if self.next is None and not self.dissolving:
            return None
        old = self.lists
        self.lists, self.next, self.dissolving = self.next, None, False
        return old
