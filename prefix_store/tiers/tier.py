"""What all tiers can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Segments
from prefix_store.tiers.counts import TierCounts
from prefix_store.tiers.halt import Halt


class Tier(Protocol):
    """Keeps frames of blocks. No method raises for a fault of the tier: a block is there and right, or it is a miss.

    A chain is the blocks of a prompt from its first one on. One event loop uses a tier; the work is done by threads.
    """

    counts: TierCounts

    @property
    def format(self) -> FrameFormat:
        """Of all frames in it."""

    @property
    def blocks(self) -> int | None:
        """How many blocks can be read; None: it cannot tell."""

    @property
    def used_bytes(self) -> int | None:
        """Of their frames; None: it cannot tell."""

    def inventory(self) -> Sequence[bytes]:
        """The stored keys of what can be read, parents before children, for the index. Waits for nothing."""

    async def lead(self, chain: Sequence[BlockId]) -> int:
        """How many leading blocks of a chain are here, not looked into. Changes nothing."""

    async def read(
        self, chain: Sequence[BlockId], into: Sequence[Segments], access: Access, halt: Halt | None = None
    ) -> int:
        """Restores the last ``len(into)`` blocks of a chain, in order, up to the first that is not there or not right.

        Args:
            halt: set, in any thread, by who takes the memory back: none of it is touched once `Halt.set` has returned,
                and this ends soon after.

        Returns:
            How many of them were restored; the segments of the others are as they were. Who cancels this may use the
            memory again at once.
        """

    async def write(
        self, chain: Sequence[BlockId], sources: Sequence[Segments], access: Access, halt: Halt | None = None
    ) -> int:
        """Keeps the last ``len(sources)`` blocks of a chain, if what comes before them is there and there is room.

        Args:
            halt: set, in any thread, by who takes the sources back: none is read once `Halt.set` has returned.

        Returns:
            How many of them are kept now, those that were there before included. The sources are not read any more
            after that.
        """

    async def touch(self, chain: Sequence[BlockId], access: Access) -> None:
        """Notes that these leading blocks were used, by who had them from elsewhere; nothing for those not here."""

    async def pin(self, chain: Sequence[BlockId]) -> int:
        """Keeps the leading blocks of a chain that are here from being evicted, until they are unpinned.

        Pins do not count: a chain that is pinned twice is unpinned at once. They keep at most half of the capacity.

        Returns:
            How many leading blocks are pinned by this; fewer than there are where pins would keep too much.
        """

    async def unpin(self, chain: Sequence[BlockId]) -> int:
        """Takes back every pin that ends at a block of the chain, so that of shorter chains in it, too.

        Returns how many leading blocks these pins kept; 0 where there was none. What chains that are pinned share with
        this one stays pinned.
        """

    async def discard(self, chain: Sequence[BlockId], keep: int) -> int:
        """Removes the blocks of a chain after the first `keep`, and whatever follows on them, pinned or not.

        Returns how many blocks of the chain went.
        """

    async def clear(self) -> int:
        """Removes everything, pinned or not; returns how many blocks it were."""

    async def frame(self, key: bytes, parent: bytes) -> bytes | None:
        """A verified copy of the frame with these stored keys, for a peer; None where there is none."""

    async def close(self) -> None:
        """Ends the threads."""
