"""Frames on disk, for all engine processes of a host."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prefix_store.codecs.errors import CannotEncode
from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.eviction.access import Access
from prefix_store.eviction.policy import Policy
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.errors import BadFrame
from prefix_store.frames.frame import check_frame
from prefix_store.frames.segments import Segments
from prefix_store.tiers.counts import TierCounts
from prefix_store.tiers.disk.attendant import Attendant, Ended
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.faults import Faults
from prefix_store.tiers.disk.keeper import WRITERS, bytes_ahead
from prefix_store.tiers.disk.membership import Membership, scratch
from prefix_store.tiers.disk.second_touch import SecondTouch
from prefix_store.tiers.halt import Halt
from prefix_store.tiers.worker import Worker

log = logging.getLogger(__name__)

_PATIENCE = 2.0
_POLL_SECONDS = 0.01
_PAUSE = 1.0
_MOST_FRAME_BYTES = 256 * 2**20
_OPEN_ACCESSES = 10_000


class _Use(NamedTuple):
    """An access as journals know it."""

    number: int
    output_length: int | None


class DiskTier:
    """A `Tier` in a folder. Threads of its own read, write and look after the folder; nothing is synced to the device.

    What a crash of the machine leaves half written is found by its checksum. A full disk, a folder that is read only
    or away, and files that are not what they should be cost misses and writes that are dropped, and are over as soon
    as the cause is.

    Args:
        path: of a folder that is empty, not there yet, or ours.
        capacity_bytes: of all frames of all processes together.
        policy: makes the policy that decides what stays, where this process comes to be the keeper.
        on_removed: told, in the event loop, the stored keys of what this process has removed as the keeper.

    Raises:
        ValueError: a sixty-fourth of the capacity, which is what a process may write ahead, is less than a frame.
        FolderUnusable, OSError: the folder cannot be used to begin with.
    """

    def __init__(
        self,
        path: Path,
        frame_format: FrameFormat,
        capacity_bytes: int,
        policy: Callable[[], Policy],
        on_removed: Callable[[Sequence[bytes]], None] = lambda keys: None,
    ) -> None:
        if bytes_ahead(capacity_bytes) < frame_format.frame_bytes:
            least = frame_format.frame_bytes * 8 * WRITERS
            raise ValueError(f"capacity_bytes is {capacity_bytes}, expected at least {least}: 64 frames of this model")
        self.format = frame_format
        self.counts = TierCounts()
        self._loop = asyncio.get_running_loop()
        self._on_removed = on_removed
        self._attendant = Attendant(path, capacity_bytes, policy, self._note_removed, self.counts.faults)
        self._reader = Worker("kv-disk-read")
        self._writer = Worker("kv-disk-write")
        self._server = Worker("kv-disk-serve")
        self._reading = Faults(f"reading KV blocks from {path}", self.counts.faults)
        self._writing = Faults(f"writing KV blocks to {path}", self.counts.faults)
        self._serving = Faults(f"reading KV blocks for peers from {path}", self.counts.faults)
        self._seen = SecondTouch()
        self._numbers = itertools.count(1)
        self._accesses: OrderedDict[Access, int] = OrderedDict()
        self._paused_until = 0.0
        self._read_frame = scratch(frame_format.frame_bytes)
        self._written_frame = scratch(frame_format.frame_bytes)[:-1]

    @property
    def identity(self) -> str | None:
        """The UUID of the folder, under which the index knows it, whichever processes use it; None: it is away."""
        membership = self._attendant.membership
        return membership.folder.identity if membership is not None else None

    @property
    def is_keeper(self) -> bool:
        """Whether this process evicts, for all."""
        return self._attendant.keeper is not None

    async def lead(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.lead`."""
        membership = self._attendant.membership
        if membership is None:
            return 0
        return await self._reader.run(lambda halt: self._lead(membership, chain))

    async def read(self, chain: Sequence[BlockId], into: Sequence[Segments], access: Access) -> int:
        """See `Tier.read`."""
        membership = self._attendant.membership
        wanted = chain[len(chain) - len(into) :]
        restored = 0
        if membership is not None and wanted:
            use = _Use(self._number_of(access), access.output_length)
            names = self._names(chain)[-len(into) :]
            restored = await self._reader.run(lambda halt: self._restore(membership, wanted, names, into, use, halt))
            if restored:
                access.watch(self, names[restored - 1])
        self.counts.hits += restored
        self.counts.misses += len(wanted) - restored
        return restored

    async def write(self, chain: Sequence[BlockId], sources: Sequence[Segments], access: Access) -> int:
        """See `Tier.write`."""
        membership = self._attendant.membership
        if membership is None:
            self.counts.dropped["there is no folder"] += len(sources)
            return 0
        first = len(chain) - len(sources)
        names = self._names(chain)
        admitted = len(sources)
        if access.one_shot:
            admitted = self._seen.lead([name.key for name in names[first:]])
            self.counts.dropped["not admitted"] += len(sources) - admitted
        if not admitted:
            return 0
        use = _Use(self._number_of(access), access.output_length)
        offered = chain[: first + admitted]
        kept = await self._writer.run(
            lambda halt: self._store(membership, offered, names, sources[:admitted], use, halt)
        )
        if kept:
            access.watch(self, names[first + kept - 1])
        return kept

    async def frame(self, key: bytes, parent: bytes) -> bytes | None:
        """See `Tier.frame`. A frame of another process may be of another format."""
        membership = self._attendant.membership
        if membership is None:
            return None
        return await self._server.run(lambda halt: self._serve(membership, key, parent))

    async def close(self) -> None:
        """See `Tier.close`. What is on disk stays."""
        for worker in (self._reader, self._writer, self._server):
            await worker.close()
        await asyncio.to_thread(self._attendant.close)

    def ended(self, access: Access, last: Hashable) -> None:
        """An access, whose chain ended with this block, has learned its output length."""
        number = self._accesses.pop(access, None)
        if number is not None and isinstance(last, BlockName) and access.output_length is not None:
            self._attendant.ended.append(Ended(number, last, access.output_length))

    def _number_of(self, access: Access) -> int:
        """By which the keeper, in whatever process, knows that uses are of one request."""
        if access not in self._accesses:
            if len(self._accesses) >= _OPEN_ACCESSES:
                self._accesses.popitem(last=False)
            self._accesses[access] = next(self._numbers) % 2**32
        return self._accesses[access]

    def _names(self, chain: Sequence[BlockId]) -> list[BlockName]:
        stored = self.format.stored_key
        return [BlockName(stored(block.key), stored(block.parent), not place) for place, block in enumerate(chain)]

    def _lead(self, membership: Membership, chain: Sequence[BlockId]) -> int:
        """Bisected: a block is there only while its parent is."""
        names = self._names(chain)
        low, high = 0, len(names)
        while low < high:
            middle = (low + high) // 2
            if membership.has(names[middle]):
                low = middle + 1
            else:
                high = middle
        return low

    def _restore(
        self,
        membership: Membership,
        wanted: Sequence[BlockId],
        names: Sequence[BlockName],
        into: Sequence[Segments],
        use: _Use,
        halt: Halt,
    ) -> int:
        began = time.perf_counter()
        restored = 0
        try:
            for block, name, segments in zip(wanted, names, into, strict=True):
                if not self._load(membership, block, name):
                    break
                with halt:
                    self.format.decode(self._read_frame[:-1], segments)
                restored += 1
            if restored:
                membership.used(names[restored - 1], use.number, use.output_length)
            self._reading.worked()
        except OSError as error:
            self._reading.failed(error)
        self.counts.bytes_read += restored * self.format.frame_bytes
        self.counts.read_seconds += time.perf_counter() - began
        return restored

    def _load(self, membership: Membership, block: BlockId, name: BlockName) -> bool:
        """Whether a block's frame is there and right, and in memory now. Raises OSError."""
        try:
            size = membership.load(name, self._read_frame)
            self.format.verify(block, self._read_frame[:size])
        except FileNotFoundError:
            return False
        except BadFrame as error:
            self._discard(membership, name, error)
            return False
        return True

    def _store(
        self,
        membership: Membership,
        chain: Sequence[BlockId],
        names: Sequence[BlockName],
        sources: Sequence[Segments],
        use: _Use,
        halt: Halt,
    ) -> int:
        """Writes the blocks from the first source's on; returns how many of them are there now."""
        first = kept = 0
        try:
            first = len(chain) - len(sources)
            if first and not membership.has(names[first - 1]):
                return self._drop("what comes before it is not here", len(sources), 0)
            for block, name, segments in zip(chain[first:], names[first:], sources, strict=False):
                if not membership.has(name):
                    if reason := self._reason_to_wait(membership):
                        self._drop(reason, len(sources), kept)
                        break
                    with halt:
                        self.format.seal(block, segments, self._written_frame)
                    membership.save(name, self._written_frame)
                    self.counts.writes += 1
                    self.counts.bytes_written += self.format.frame_bytes
                kept += 1
            if kept:
                membership.used(names[first + kept - 1], use.number, use.output_length)
            self._writing.worked()
        except CannotEncode as error:
            self._drop(str(error), len(sources), kept)
        except OSError as error:
            self._paused_until = time.monotonic() + _PAUSE
            self._drop("the disk failed", len(sources), kept)
            self._writing.failed(error)
        return kept

    def _reason_to_wait(self, membership: Membership) -> str:
        """Why a frame cannot be written now, after some patience with the keeper; empty if it can. Raises OSError."""
        deadline = time.monotonic() + _PATIENCE
        if time.monotonic() < self._paused_until:
            return "the disk failed a moment ago"
        while not membership.may_write(self.format.frame_bytes):
            if time.monotonic() > deadline or not self._attendant.wait(_POLL_SECONDS):
                self._paused_until = time.monotonic() + _PAUSE
                return "no process makes room"
        return ""

    def _drop(self, reason: str, offered: int, kept: int) -> int:
        self.counts.dropped[reason] += offered - kept
        return kept

    def _serve(self, membership: Membership, key: bytes, parent: bytes) -> bytes | None:
        """Who asks does not say whether it is the first of a chain."""
        for name in (BlockName(key, parent, False), BlockName(key, parent, True)):
            if membership.has(name):
                return self._served(membership, name)
        return None

    def _served(self, membership: Membership, name: BlockName) -> bytes | None:
        try:
            size = os.stat(membership.folder.block(name)).st_size
            frame = np.empty(min(size, _MOST_FRAME_BYTES) + 1, np.uint8)
            data = frame[: membership.load(name, frame)]
            check_frame(data.data, name.key, name.parent)
            self._serving.worked()
            return data.tobytes()
        except FileNotFoundError:
            return None
        except BadFrame as error:
            with contextlib.suppress(OSError):
                self._discard(membership, name, error)
        except OSError as error:
            self._serving.failed(error)
        return None

    def _discard(self, membership: Membership, name: BlockName, error: BadFrame) -> None:
        self.counts.bad_frames[error.field] += 1
        log.error("removing %s: %s", membership.folder.block(name), error)
        membership.discard(name)

    def _note_removed(self, keys: list[bytes]) -> None:
        """From the keeper's thread."""
        self.counts.evicted += len(keys)
        with contextlib.suppress(RuntimeError):  # the event loop has ended before the tier
            self._loop.call_soon_threadsafe(self._on_removed, keys)
