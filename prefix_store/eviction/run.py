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
    """A stretch of a chain. Every block of it has the same history, so what is known of one is known of all.

        keys:  k0 k1 k2 k3 │ k4 k5
               └─ stored ──┘ └ remembered: their bytes have gone, what is known of them has not

    `depth` is how many blocks come before k0. Blocks of other requests may follow the last key (`children`).
    """

    keys: list[K]
    depth: int
    parent: Run[K] | None
    size: int = 1
    """Bytes of each block that is stored."""
    stored: int = 0
    """How many keys, from the first on, have their bytes here."""
    children: set[Run[K]] = field(default_factory=set)
    pins: int = 0
    """Of the last key."""
    followers: int = 0
    """Why the last stored block must stay: children with something stored, and pins."""
    access: Access = NO_ACCESS
    """The last use."""
    turn: int = 0
    """Number of the last use, in the order in which the tree saw them."""
    uses: int = 0
    volume: float = 0.0
    """How often the capacity had been written over at the last use."""
    mark: int = 0
    """The policy's, of every block in it."""
    place: int = -1
    """The policy's: where it has this run among those that may lose blocks; negative if it has not."""

    @property
    def end(self) -> int:
        """How many blocks a chain has that ends with the last key."""
        return self.depth + len(self.keys)

    @property
    def may_shrink(self) -> bool:
        """Whether nothing that is stored, and no pin, keeps the last stored block."""
        return self.stored > 0 and self.followers == 0
