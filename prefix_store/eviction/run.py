"""Blocks that follow each other and were always used together: one node of the tree."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from prefix_store.eviction.access import Access

K = TypeVar("K", bound=Hashable)

NO_ACCESS = Access(0.0)


@dataclass(slots=True, eq=False)
class Run(Generic[K]):
    """A part of a chain whose blocks all have the same history, which is recorded once for all of them.

        keys:  k0 k1 k2 k3 │ k4 k5
               └─ stored ──┘ └ remembered: evicted, but with their history

    `depth` is the number of blocks before k0. `children` are the runs after the last key.
    """

    keys: list[K]
    depth: int
    parent: Run[K] | None
    size: int = 1
    """Bytes of each block that is stored."""
    stored: int = 0
    """How many leading keys have their bytes here."""
    children: set[Run[K]] = field(default_factory=set)
    pins: int = 0
    """Of the last key."""
    followers: int = 0
    """Stored children and pins; while there are any the last stored block stays."""
    access: Access = NO_ACCESS
    """The last use."""
    turn: int = 0
    """Number of the last use, in the order of the tree's uses."""
    uses: int = 0
    volume: float = 0.0
    """What was written before the last use, in capacities."""
    mark: int = 0
    """The policy's, for all its blocks."""
    place: int = -1
    """The policy's: position among the runs that may lose blocks; negative if it is not one."""

    @property
    def end(self) -> int:
        """Blocks of the chain that ends with the last key."""
        return self.depth + len(self.keys)

    @property
    def may_shrink(self) -> bool:
        """Whether the last stored block may be evicted."""
        return self.stored > 0 and self.followers == 0
