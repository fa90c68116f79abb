"""Pins and removes blocks on request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.tiers.counts import FailureLog, TierCounts
from prefix_store.tiers.disk.block_name import BlockName, block_name
from prefix_store.tiers.disk.folder_session import FolderSession
from prefix_store.tiers.disk.reader import leading_blocks

_EVICTOR_TIMEOUT = 2.0
_POLL_SECONDS = 0.01
_TRIES = 3


class DiskControl:
    """Writes pins and removals to the folder, and waits until the evictor has read them. One thread uses it.

    Without an evictor it waits for two seconds. The next evictor applies them; until then nothing is evicted.

    Args:
        wait: waits that many seconds for the evictor; False when the tier is closing.
    """

    def __init__(
        self, path: Path, frame_format: FrameFormat, counts: TierCounts, wait: Callable[[float], bool]
    ) -> None:
        self._format = frame_format
        self._wait = wait
        self._faults = FailureLog(f"pinning and removing KV blocks in {path}", counts.io_errors)

    def pin(self, session: FolderSession, chain: Sequence[BlockId]) -> int:
        """Pins the leading blocks that are stored; returns how many the evictor accepted."""
        pinned = tries = 0
        with self._faults.handled():
            while not pinned and tries < _TRIES and (count := leading_blocks(session, self._format, chain)):
                tries += 1  # a block may be evicted before the evictor reads the pin
                pinned = self._pin(session, chain[:count])
        return pinned

    def unpin(self, session: FolderSession, chain: Sequence[BlockId]) -> int:
        """Removes every pin at a block of the chain; returns how many blocks the longest of them kept."""
        names = [block_name(self._format, chain, place) for place in range(len(chain))]
        unpinned = 0
        with self._faults.handled():
            if pinned := _last_pinned(session, names):
                session.unpin(names)
                self._wait_until_read(session)
                unpinned = pinned
        return unpinned

    def discard(self, session: FolderSession, chain: Sequence[BlockId], keep: int) -> int:
        """Removes the blocks after the first `keep`, pinned or not; the evictor removes their descendants."""
        gone = 0
        with self._faults.handled():
            count = leading_blocks(session, self._format, chain)
            for place in reversed(range(keep, count)):
                session.discard(block_name(self._format, chain, place), notify=place == keep)
                gone += 1
            if gone:
                self._wait_until_read(session)
        return gone

    def clear(self, session: FolderSession) -> int:
        """Removes every block of every process, and all pins; returns the number of blocks."""
        gone = 0
        with self._faults.handled():
            gone = session.clear()
            self._wait_until_read(session)
        return gone

    def _pin(self, session: FolderSession, chain: Sequence[BlockId]) -> int:
        """Pins a chain; returns how many of its blocks are pinned once the evictor has read it. Raises OSError."""
        names = [block_name(self._format, chain, place) for place in range(len(chain))]
        session.pin(names[-1])
        self._wait_until_read(session)
        # The evictor shortens a pin that exceeds the limit.
        pinned = _last_pinned(session, names)
        return pinned if pinned and session.has(names[pinned - 1]) else 0

    def _wait_until_read(self, session: FolderSession) -> None:
        position = session.position()
        deadline = time.monotonic() + _EVICTOR_TIMEOUT
        while not session.is_read(position) and time.monotonic() < deadline and self._wait(_POLL_SECONDS):
            pass


def _last_pinned(session: FolderSession, names: Sequence[BlockName]) -> int:
    """How many leading blocks of a chain its own pins keep. Raises OSError."""
    pinned = set(session.folder.pinned())
    return next((place for place in range(len(names), 0, -1) if names[place - 1] in pinned), 0)
