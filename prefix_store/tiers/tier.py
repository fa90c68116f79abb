"""The interface of a tier: a place outside an engine's memory that stores KV blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefix_store.codecs.frame_format import BlockSource, FrameFormat
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Segments
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.counts import TierCounts


class Tier(Protocol):
    """Stores frames of blocks. No method raises for a fault of the tier: a missing or damaged block is a miss.

    A chain is the blocks of a prompt from its first one on. One event loop uses a tier; threads do the work.
    """

    counts: TierCounts

    @property
    def format(self) -> FrameFormat:
        """The format of its frames."""

    @property
    def blocks(self) -> int | None:
        """The number of stored blocks; None if unknown."""

    @property
    def used_bytes(self) -> int | None:
        """Bytes of their frames; None if unknown."""

    def inventory(self) -> Sequence[bytes]:
        """The stored keys of all blocks, parents before children, for the index. Does not block."""

    async def lookup(self, chain: Sequence[BlockId]) -> int:
        """The number of leading blocks of a chain that are stored; not verified. Changes nothing."""

    async def read(
        self, chain: Sequence[BlockId], into: Sequence[Segments], access: Access, cancel: CancelToken | None = None
    ) -> int:
        """Restores the last ``len(into)`` blocks of a chain, in order, up to the first that is missing or damaged.

        Args:
            cancel: frees the segments: once `CancelToken.set` has returned none of them is written.

        Returns:
            How many of them were restored; the other segments are unchanged. After a cancellation the memory may be
            used again at once.
        """

    async def write(
        self,
        chain: Sequence[BlockId],
        sources: Sequence[BlockSource],
        access: Access,
        cancel: CancelToken | None = None,
    ) -> int:
        """Stores the last ``len(sources)`` blocks of a chain, if their ancestors are stored and there is space.

        Args:
            cancel: frees the sources: once `CancelToken.set` has returned none of their segments is read. What is read
                of a `SealedBlock`'s frame after that is not stored.

        Returns:
            How many of them are stored now, including those that were before. Their segments are not read
            after the return.
        """

    async def touch(self, chain: Sequence[BlockId], access: Access) -> None:
        """Records a use of these leading blocks, restored from elsewhere; blocks that are not stored are skipped."""

    async def pin(self, chain: Sequence[BlockId]) -> int:
        """Protects the stored leading blocks of a chain from eviction, until they are unpinned.

        Pins are not counted: one unpin undoes two pins of a chain. Pins protect at most half of the capacity.

        Returns:
            How many leading blocks are pinned; fewer than are stored if the limit is reached.
        """

    async def unpin(self, chain: Sequence[BlockId]) -> int:
        """Removes every pin that ends at a block of the chain, so those of shorter chains in it, too.

        Returns how many leading blocks these pins protected; 0 if there was none. Blocks shared with another pinned
        chain stay pinned.
        """

    async def discard(self, chain: Sequence[BlockId], keep: int) -> int:
        """Removes the blocks of a chain after the first `keep`, and their descendants, pinned or not.

        Returns how many blocks of the chain were removed.
        """

    async def clear(self) -> int:
        """Removes everything, pinned or not; returns the number of blocks."""

    async def frame(self, key: bytes, parent: bytes) -> bytes | None:
        """A verified copy of the frame with these stored keys, for a peer; None if there is none."""

    async def close(self) -> None:
        """Ends the threads."""
