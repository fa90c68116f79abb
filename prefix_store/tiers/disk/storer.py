"""The thread that writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prefix_store.codecs.errors import CannotEncode
from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Segments
from prefix_store.tiers.counts import TAKEN_BACK, TierCounts
from prefix_store.tiers.disk.block_name import block_name
from prefix_store.tiers.disk.membership import Membership, scratch
from prefix_store.tiers.disk.use import Use
from prefix_store.tiers.faults import Faults
from prefix_store.tiers.halt import Halt, Halted
from prefix_store.tiers.progress import Progress

_PATIENCE = 2.0
_POLL_SECONDS = 0.01
_PAUSE = 1.0


class Storer:
    """Seals blocks in a buffer of its own, and writes that. One thread uses it.

    After a failure it writes nothing for a second: what is offered then is dropped.

    Args:
        wait: lets the keeper work for so many seconds; False when there is nothing to wait for any more.
    """

    def __init__(
        self, path: Path, frame_format: FrameFormat, counts: TierCounts, wait: Callable[[float], bool]
    ) -> None:
        self._format = frame_format
        self._counts = counts
        self._wait = wait
        self._faults = Faults(f"writing KV blocks to {path}", counts.faults)
        self._frame = scratch(frame_format.frame_bytes)[:-1]
        self._paused_until = 0.0

    def store(
        self,
        membership: Membership,
        chain: Sequence[BlockId],
        sources: Sequence[Segments],
        use: Use,
        progress: Progress,
        halt: Halt,
    ) -> str:
        """Writes the last ``len(sources)`` blocks as far as possible; the progress is how many of them are there.

        Returns why it is not all of them; empty if it is.
        """
        first, reason = len(chain) - len(sources), ""
        try:
            if first and not membership.has(block_name(self._format, chain, first - 1)):
                reason = "what comes before it is not here"
            while not reason and progress.done < len(sources):
                place = first + progress.done
                reason = self._store(membership, chain, place, sources[progress.done], halt)
                progress.done += not reason
            if progress.done:
                last = block_name(self._format, chain, first + progress.done - 1)
                membership.used(last, use.number, use.output_length)
            self._faults.worked()
        except OSError as error:
            reason = "the disk failed"
            self._paused_until = time.monotonic() + _PAUSE
            self._faults.failed(error)
        return reason

    def _store(self, membership: Membership, chain: Sequence[BlockId], place: int, source: Segments, halt: Halt) -> str:
        """Why a block is not there now; empty if it is. Raises OSError."""
        name = block_name(self._format, chain, place)
        if membership.has(name):
            return ""
        if reason := self._reason_to_wait(membership):
            return reason
        try:
            with halt:
                self._format.seal(chain[place], source, self._frame)
        except CannotEncode as error:
            return str(error)
        except Halted:
            return TAKEN_BACK
        membership.save(name, self._frame)
        self._counts.writes += 1
        self._counts.bytes_written += self._format.frame_bytes
        return ""

    def _reason_to_wait(self, membership: Membership) -> str:
        """Why a frame cannot be written now, after some patience with the keeper; empty if it can. Raises OSError."""
        deadline = time.monotonic() + _PATIENCE
        if time.monotonic() < self._paused_until:
            return "the disk failed a moment ago"
        while not membership.may_write(self._format.frame_bytes):
            if time.monotonic() > deadline or not self._wait(_POLL_SECONDS):
                self._paused_until = time.monotonic() + _PAUSE
                return "no process makes room"
        return ""
