"""Reads blocks from disk: for this process's engine, and for peers."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import BadFrame, check_frame
from prefix_store.frames.segments import Segments, buffer
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import FailureLog, Progress, TierCounts
from prefix_store.tiers.disk.block_name import BlockName, block_name
from prefix_store.tiers.disk.folder_session import FolderSession, Use, scratch


class DiskReader:
    """Reads frames into a buffer, verifies them there, and copies them to the engine. One thread uses it."""

    def __init__(self, path: Path, frame_format: FrameFormat, counts: TierCounts) -> None:
        self._format = frame_format
        self._counts = counts
        self._faults = FailureLog(f"reading KV blocks from {path}", counts.io_errors)
        self._frame = scratch(frame_format.frame_bytes)

    def touch(self, session: FolderSession, chain: Sequence[BlockId], use: Use) -> int:
        """Records a use of the leading blocks; returns how many of them are stored."""
        touched = 0
        with self._faults.handled():
            if leading := leading_blocks(session, self._format, chain):
                session.used(block_name(self._format, chain, leading - 1), use.number, use.output_length)
                touched = leading
        return touched

    def restore(
        self,
        session: FolderSession,
        chain: Sequence[BlockId],
        into: Sequence[Segments],
        use: Use,
        progress: Progress,
        cancel: CancelToken,
    ) -> None:
        """Restores the last ``len(into)`` blocks, up to the first that is missing or damaged."""
        began = time.perf_counter()
        first = len(chain) - len(into)
        with self._faults.handled():
            with contextlib.suppress(Cancelled):
                for place, segments in enumerate(into, first):
                    if not self._load(session, chain[place], block_name(self._format, chain, place)):
                        break
                    with cancel:
                        self._format.decode(self._frame[:-1], segments)
                        progress.done += 1
            if progress.done:
                last = block_name(self._format, chain, first + progress.done - 1)
                session.used(last, use.number, use.output_length)
        self._counts.bytes_read += progress.done * self._format.frame_bytes
        self._counts.read_seconds += time.perf_counter() - began

    def _load(self, session: FolderSession, block: BlockId, name: BlockName) -> bool:
        """Reads a block's frame into the buffer; False if it is missing or damaged. Raises OSError."""
        try:
            size = session.load(name, self._frame)
            self._format.verify(block, self._frame[:size])
        except FileNotFoundError:
            return False
        except BadFrame as error:
            discard(session, name, error, self._counts.bad_frames)
            return False
        return True


def leading_blocks(session: FolderSession, frame_format: FrameFormat, chain: Sequence[BlockId]) -> int:
    """The number of leading blocks that are stored. Bisection: a block is stored only while its parent is."""
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        if session.has(block_name(frame_format, chain, middle)):
            low = middle + 1
        else:
            high = middle
    return low


log = logging.getLogger(__name__)


def discard(session: FolderSession, name: BlockName, error: BadFrame, bad_frames: Counter[str]) -> None:
    """Removes a damaged frame; counts and logs it, unless it has gone: then it was written over. Raises OSError."""
    if session.has(name):
        bad_frames[error.field] += 1
        log.error("removing %s: %s", session.folder.block(name), error)
    session.discard(name)


_MAX_FRAME_BYTES = 256 * 2**20


class PeerFrameReader:
    """Reads frames for peers by their stored keys, of any process and format. One thread uses it."""

    def __init__(self, path: Path, counts: TierCounts) -> None:
        self._counts = counts
        self._faults = FailureLog(f"reading KV blocks for peers from {path}", counts.io_errors)

    def give(self, session: FolderSession, key: bytes, parent: bytes) -> bytes | None:
        """A verified frame, or None. The keys do not tell whether it is the first of a chain."""
        for name in (BlockName(key, parent, False), BlockName(key, parent, True)):
            if session.has(name):
                return self._read(session, name)
        return None

    def _read(self, session: FolderSession, name: BlockName) -> bytes | None:
        try:
            size = os.stat(session.folder.block(name)).st_size
            frame = buffer(min(size, _MAX_FRAME_BYTES) + 1)
            data = frame[: session.load(name, frame)]
            check_frame(data.data, name.key, name.parent)
            self._faults.recovered()
            return data.tobytes()
        except FileNotFoundError:
            return None
        except BadFrame as error:
            with contextlib.suppress(OSError):
                discard(session, name, error, self._counts.bad_frames)
        except OSError as error:
            self._faults.failed(error)
        return None
