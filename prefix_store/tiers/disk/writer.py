"""Writes blocks to disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prefix_store.codecs.codec import CannotEncode
from prefix_store.codecs.frame_format import BlockSource, FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import CANCELLED, FailureLog, Progress, TierCounts
from prefix_store.tiers.disk.block_name import block_name
from prefix_store.tiers.disk.folder_session import FolderSession, Use, scratch

_EVICTOR_TIMEOUT = 2.0
_POLL_SECONDS = 0.01
_PAUSE = 1.0
_NO_PARENT = "what comes before it is not here"


class DiskWriter:
    """Writes blocks: the frames that they come with, or else frames that it encodes into a buffer. One thread uses it.

    After a failure it writes nothing for a second: blocks offered then are dropped.

    Args:
        wait: waits that many seconds for the evictor; False when the tier is closing.
    """

    def __init__(
        self, path: Path, frame_format: FrameFormat, counts: TierCounts, wait: Callable[[float], bool]
    ) -> None:
        self._format = frame_format
        self._counts = counts
        self._wait = wait
        self._faults = FailureLog(f"writing KV blocks to {path}", counts.io_errors)
        self._frame = scratch(frame_format.frame_bytes)[:-1]
        self._paused_until = 0.0

    def store(
        self,
        session: FolderSession,
        chain: Sequence[BlockId],
        sources: Sequence[BlockSource],
        use: Use,
        progress: Progress,
        cancel: CancelToken,
    ) -> str:
        """Writes the last ``len(sources)`` blocks in order; ``progress`` counts those that are stored.

        Returns the reason why not all of them are; empty if all are.
        """
        first, reason = len(chain) - len(sources), ""
        try:
            if not self._has_parent(session, chain, first):
                reason = _NO_PARENT
            while not reason and progress.done < len(sources):
                place = first + progress.done
                reason = self._store(session, chain, place, sources[progress.done], cancel)
                progress.done += not reason
            if progress.done:
                last = block_name(self._format, chain, first + progress.done - 1)
                session.used(last, use.number, use.output_length)
            self._faults.recovered()
        except OSError as error:
            reason = "the disk failed"
            self._paused_until = time.monotonic() + _PAUSE
            self._faults.failed(error)
        return reason

    def _store(
        self, session: FolderSession, chain: Sequence[BlockId], place: int, source: BlockSource, cancel: CancelToken
    ) -> str:
        """Writes a block. Returns the reason if it is not stored, else an empty text. Raises OSError."""
        name = block_name(self._format, chain, place)
        if session.has(name):
            return ""
        if reason := self._wait_for_space(session):
            return reason
        if not self._has_parent(session, chain, place):  # a full disk may evict what is new
            return _NO_PARENT
        try:
            if (lent := self._format.frame_in(source)) is not None:
                session.save(name, lent, cancel)
            else:
                with cancel:
                    self._format.seal(chain[place], source, self._frame)
                session.save(name, self._frame)
        except CannotEncode as error:
            return str(error)
        except Cancelled:
            return CANCELLED
        self._counts.writes += 1
        self._counts.bytes_written += self._format.frame_bytes
        return ""

    def _has_parent(self, session: FolderSession, chain: Sequence[BlockId], place: int) -> bool:
        return not place or session.has(block_name(self._format, chain, place - 1))

    def _wait_for_space(self, session: FolderSession) -> str:
        """Waits for space. Returns the reason if a frame cannot be written, else an empty text. Raises OSError."""
        deadline = time.monotonic() + _EVICTOR_TIMEOUT
        if time.monotonic() < self._paused_until:
            return "the disk failed a moment ago"
        while not session.may_write(self._format.frame_bytes):
            if time.monotonic() > deadline or not self._wait(_POLL_SECONDS):
                self._paused_until = time.monotonic() + _PAUSE
                return "no process makes room"
        return ""
