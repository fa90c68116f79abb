"""Frames on disk, for all engine processes of a host."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

from prefix_store.codecs.frame_format import BlockSource, FrameFormat
from prefix_store.eviction.access import Access
from prefix_store.eviction.policy import Policy
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Segments
from prefix_store.tiers.admission import SecondUseAdmission
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import CANCELLED, Progress, TierCounts
from prefix_store.tiers.disk.block_name import BlockName, block_name
from prefix_store.tiers.disk.control import DiskControl
from prefix_store.tiers.disk.evictor import WRITERS, bytes_ahead
from prefix_store.tiers.disk.folder_session import Use
from prefix_store.tiers.disk.inventory import Inventory, ScanResult
from prefix_store.tiers.disk.maintenance import Ended, MaintenanceThread
from prefix_store.tiers.disk.reader import DiskReader, PeerFrameReader, leading_blocks
from prefix_store.tiers.disk.writer import DiskWriter
from prefix_store.tiers.worker import Worker

_OPEN_ACCESSES = 10_000


class DiskTier:
    """A `Tier` in a folder. Its own threads read, write and maintain the folder; nothing is synced to the device.

    Checksums detect files that a crash of the machine left half written. A full disk, a read-only or missing folder,
    and damaged files cause misses and dropped writes, until the cause is removed. Create it in the event loop that uses
    it.

    Args:
        path: of a folder that is empty, missing, or a disk tier's.
        capacity_bytes: of all frames of all processes together.
        policy: makes the eviction policy, if this process becomes the evictor.
        on_removed: called in the event loop with the stored keys that this process removed as the evictor.

    Raises:
        ValueError: a sixty-fourth of the capacity, which is what a process may write ahead, is less than a frame.
        FolderUnusable, OSError: the folder cannot be used at the start.
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
            raise ValueError(f"{capacity_bytes:,} bytes, expected at least {least:,}: 64 blocks of this model")
        self.format = frame_format
        self.counts = TierCounts()
        self._loop = asyncio.get_running_loop()
        self._on_removed = on_removed
        self._inventory = Inventory()
        self._maintenance = MaintenanceThread(
            path,
            capacity_bytes,
            frame_format.frame_bytes,
            policy,
            self._note_removed,
            self._note_listed,
            self.counts.io_errors,
        )
        # Not the reader's thread: a long restore would delay all look-ups.
        self._finder = Worker("kv-disk-find")
        self._reader = Worker("kv-disk-read")
        self._writer = Worker("kv-disk-write", is_urgent=False)
        self._server = Worker("kv-disk-serve")
        self._overseer = Worker("kv-disk-oversee")
        self._disk_reader = DiskReader(path, frame_format, self.counts)
        self._disk_writer = DiskWriter(path, frame_format, self.counts, self._maintenance.wait)
        self._control = DiskControl(path, frame_format, self.counts, self._maintenance.wait)
        self._peer_frame_reader = PeerFrameReader(path, self.counts)
        self._seen = SecondUseAdmission(self.counts)
        self._numbers = itertools.count(1)
        self._accesses: OrderedDict[Access, int] = OrderedDict()

    @property
    def identity(self) -> str | None:
        """The UUID of the folder, its name in the index, the same for all processes; None: it is missing."""
        session = self._maintenance.session
        return session.folder.identity if session is not None else None

    @property
    def is_evictor(self) -> bool:
        """Whether this process is the evictor."""
        return self._maintenance.evictor is not None

    @property
    def blocks(self) -> int:
        """See `Tier.blocks`. As old as the inventory."""
        return len(self._inventory) if self._maintenance.session is not None else 0

    @property
    def used_bytes(self) -> int:
        """See `Tier.used_bytes`. As old as the inventory."""
        return self.blocks * self.format.frame_bytes

    def inventory(self) -> Sequence[bytes]:
        """See `Tier.inventory`. Blocks of all processes whose frames have this size, as they were up to a minute ago.

        The folder is listed every half minute, a few milliseconds at a time; for 40,000 blocks that takes some four
        seconds on a busy machine, and almost no time if nothing has changed. Blocks that this process has written
        since, or removed as the evictor, are counted at once; changes of other processes are not. Empty without a
        folder, incomplete until `listed` has returned.
        """
        return self._inventory.keys() if self._maintenance.session is not None else ()

    async def listed(self) -> None:
        """Returns after the first listing of the folder; until then the inventory lacks older blocks."""
        await self._inventory.is_listed.wait()

    async def lookup(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.lookup`."""
        session = self._maintenance.session
        if session is None:
            return 0
        return await self._finder.run(lambda cancel: leading_blocks(session, self.format, chain))

    async def read(
        self, chain: Sequence[BlockId], into: Sequence[Segments], access: Access, cancel: CancelToken | None = None
    ) -> int:
        """See `Tier.read`."""
        session = self._maintenance.session
        progress = Progress()
        if session is not None and into:
            use = Use(self._number_of(access), access.output_length)
            with contextlib.suppress(Cancelled):
                await self._reader.run(
                    lambda cancel: self._disk_reader.restore(session, chain, into, use, progress, cancel), cancel
                )
        restored = progress.done
        if restored:
            self._inventory.add(self._keys(chain[: len(chain) - len(into) + restored]))
            access.watch(self, block_name(self.format, chain, len(chain) - len(into) + restored - 1))
        self.counts.hits += restored
        self.counts.misses += len(into) - restored
        return restored

    async def write(
        self,
        chain: Sequence[BlockId],
        sources: Sequence[BlockSource],
        access: Access,
        cancel: CancelToken | None = None,
    ) -> int:
        """See `Tier.write`."""
        session = self._maintenance.session
        if session is None:
            self.counts.rejected["there is no folder"] += len(sources)
            return 0
        first = len(chain) - len(sources)
        admitted = self._seen.admitted(self._keys(chain[first:]), access)
        if not admitted:
            return 0
        use = Use(self._number_of(access), access.output_length)
        offered, contents = chain[: first + admitted], sources[:admitted]
        progress = Progress()
        try:
            reason = await self._writer.run(
                lambda cancel: self._disk_writer.store(session, offered, contents, use, progress, cancel), cancel
            )
        except Cancelled:
            reason = CANCELLED
        kept = progress.done
        if kept < admitted:
            self.counts.rejected[reason] += admitted - kept
        if kept:
            self._inventory.add(self._keys(chain[: first + kept]))
            access.watch(self, block_name(self.format, chain, first + kept - 1))
        return kept

    async def touch(self, chain: Sequence[BlockId], access: Access) -> None:
        """See `Tier.touch`."""
        session = self._maintenance.session
        if session is not None and chain:
            use = Use(self._number_of(access), access.output_length)
            touched = await self._reader.run(lambda cancel: self._disk_reader.touch(session, chain, use))
            if touched:
                access.watch(self, block_name(self.format, chain, touched - 1))

    async def pin(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.pin`. Holds for all processes, and is in the folder until unpinned."""
        session = self._maintenance.session
        if session is None:
            return 0
        return await self._overseer.run(lambda cancel: self._control.pin(session, chain))

    async def unpin(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.unpin`."""
        session = self._maintenance.session
        if session is None:
            return 0
        return await self._overseer.run(lambda cancel: self._control.unpin(session, chain))

    async def discard(self, chain: Sequence[BlockId], keep: int) -> int:
        """See `Tier.discard`. The evictor removes and reports the descendants."""
        session = self._maintenance.session
        if session is None:
            return 0
        gone = await self._overseer.run(lambda cancel: self._control.discard(session, chain, keep))
        self._inventory.remove(self._keys(chain[keep : keep + gone]))
        return gone

    async def clear(self) -> int:
        """See `Tier.clear`. The whole folder: blocks of all processes, of every format."""
        session = self._maintenance.session
        if session is None:
            return 0
        gone = await self._overseer.run(lambda cancel: self._control.clear(session))
        self._inventory.clear()
        return gone

    async def frame(self, key: bytes, parent: bytes) -> bytes | None:
        """See `Tier.frame`. A frame of another process may be of another format."""
        session = self._maintenance.session
        if session is None:
            return None
        return await self._server.run(lambda cancel: self._peer_frame_reader.give(session, key, parent))

    async def close(self) -> None:
        """See `Tier.close`. What is on disk stays."""
        workers = (self._finder, self._reader, self._writer, self._server, self._overseer)
        await asyncio.gather(*(worker.close() for worker in workers))
        await self._maintenance.close()

    def on_access_end(self, access: Access, last: Hashable) -> None:
        """An access, whose chain ended with this block, has its output length now."""
        number = self._accesses.pop(access, None)
        if number is not None and isinstance(last, BlockName) and access.output_length is not None:
            self._maintenance.ended.append(Ended(number, last, access.output_length))

    def _number_of(self, access: Access) -> int:
        """The number by which the evictor recognises uses of one request."""
        if access not in self._accesses:
            if len(self._accesses) >= _OPEN_ACCESSES:
                self._accesses.popitem(last=False)
            self._accesses[access] = next(self._numbers) % 2**32
        return self._accesses[access]

    def _note_removed(self, keys: list[bytes]) -> None:
        """From the evictor's thread."""
        self.counts.evictions += len(keys)
        with contextlib.suppress(RuntimeError):  # the event loop has ended before the tier
            self._loop.call_soon_threadsafe(self._forget, keys)

    def _note_listed(self, listed: ScanResult) -> None:
        """From the maintenance thread."""
        with contextlib.suppress(RuntimeError):  # as above
            self._loop.call_soon_threadsafe(self._inventory.take, listed)

    def _forget(self, keys: list[bytes]) -> None:
        self._inventory.remove(keys)
        self._on_removed(keys)

    def _keys(self, chain: Sequence[BlockId]) -> list[bytes]:
        return [self.format.stored_key(block.key) for block in chain]
