"""The thread that reads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.errors import BadFrame
from prefix_store.frames.segments import Segments
from prefix_store.tiers.counts import TierCounts
from prefix_store.tiers.disk.block_name import BlockName, block_name
from prefix_store.tiers.disk.discard import discard
from prefix_store.tiers.disk.membership import Membership, scratch
from prefix_store.tiers.disk.use import Use
from prefix_store.tiers.faults import Faults
from prefix_store.tiers.halt import Halt, Halted
from prefix_store.tiers.progress import Progress


class Restorer:
    """Reads frames into a buffer of its own, checks them there, and copies what is right. One thread uses it."""

    def __init__(self, path: Path, frame_format: FrameFormat, counts: TierCounts) -> None:
        self._format = frame_format
        self._counts = counts
        self._faults = Faults(f"reading KV blocks from {path}", counts.faults)
        self._frame = scratch(frame_format.frame_bytes)

    def touch(self, membership: Membership, chain: Sequence[BlockId], use: Use) -> int:
        """Says that leading blocks were used; how many of them have a file."""
        lead = lead_of(membership, self._format, chain)
        try:
            if lead:
                membership.used(block_name(self._format, chain, lead - 1), use.number, use.output_length)
            self._faults.worked()
        except OSError as error:
            self._faults.failed(error)
            return 0
        return lead

    def restore(
        self,
        membership: Membership,
        chain: Sequence[BlockId],
        into: Sequence[Segments],
        use: Use,
        progress: Progress,
        halt: Halt,
    ) -> None:
        """Restores the last ``len(into)`` blocks, up to the first that is not there or not right."""
        began = time.perf_counter()
        first = len(chain) - len(into)
        try:
            with contextlib.suppress(Halted):
                for place, segments in enumerate(into, first):
                    if not self._load(membership, chain[place], block_name(self._format, chain, place)):
                        break
                    with halt:
                        self._format.decode(self._frame[:-1], segments)
                        progress.done += 1
            if progress.done:
                last = block_name(self._format, chain, first + progress.done - 1)
                membership.used(last, use.number, use.output_length)
            self._faults.worked()
        except OSError as error:
            self._faults.failed(error)
        self._counts.bytes_read += progress.done * self._format.frame_bytes
        self._counts.read_seconds += time.perf_counter() - began

    def _load(self, membership: Membership, block: BlockId, name: BlockName) -> bool:
        """Whether a block's frame is there and right, and in the buffer now. Raises OSError."""
        try:
            size = membership.load(name, self._frame)
            self._format.verify(block, self._frame[:size])
        except FileNotFoundError:
            return False
        except BadFrame as error:
            discard(membership, name, error, self._counts.bad_frames)
            return False
        return True


def lead_of(membership: Membership, frame_format: FrameFormat, chain: Sequence[BlockId]) -> int:
    """How many leading blocks have a file. Bisected: a block is there only while its parent is."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        if membership.has(block_name(frame_format, chain, middle)):
            low = middle + 1
        else:
            high = middle
    return low
