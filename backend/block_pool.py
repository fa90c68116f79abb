"""Ownership of KV blocks: which are free, and how many sequences hold each of the others."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Hands out block numbers with reference counts.

    Invariant: every block is either free with count 0, or held with count ≥ 1; the two together are all of them.
    The pool knows nothing of what a block contains; one thread uses it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, expected at least 1")
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks, each with one reference; None, and no change, if there are not as many."""
        if count > len(self._free):
            return None
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._counts[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Adds a reference to a held block."""
        if not self._counts[block]:
            raise ValueError(f"block {block} is free and cannot be shared")
        self._counts[block] += 1

    def release(self, blocks: list[int]) -> None:
        """Drops one reference from each block; those without any become free."""
        for block in blocks:
            if not self._counts[block]:
                raise ValueError(f"block {block} is already free")
            self._counts[block] -= 1
            if not self._counts[block]:
                self._free.append(block)

    def references(self, block: int) -> int:
        """How many hold this block."""
        return self._counts[block]
