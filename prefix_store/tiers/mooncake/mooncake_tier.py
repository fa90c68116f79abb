"""Frames in the memory of many hosts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from prefix_store.codecs.codec import CannotEncode
from prefix_store.codecs.frame_format import BlockSource, FrameFormat
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import BadFrame, check_frame
from prefix_store.frames.segments import Bytes, Segments
from prefix_store.tiers.admission import SecondUseAdmission
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import CANCELLED, Progress, TierCounts
from prefix_store.tiers.mooncake.call_thread import CallThread
from prefix_store.tiers.mooncake.pool import MASTER_ERRORS, Pool, failure

log = logging.getLogger(__name__)

_LANE_BYTES = 16 * 2**20
_RETRY_SECONDS = 5.0
_LEAVE_SECONDS = 2.0


class MooncakeTier:
    """A `Tier` in a Mooncake store, which all engines that have its configuration share.

    Mooncake's master locates and evicts blocks: those that were looked up or read last stay, whatever their place in a
    chain. So the index does not list them, and a chain may have holes; blocks behind one are not found.

    Before the master's first reply nothing is found and nothing is stored, nor after a call that it did not answer: it
    is asked in the background until it does, so that only calls that are under way then wait for it.

    Args:
        settings: path of Mooncake's configuration file.
        namespace: digest of the model's fingerprint, 16 bytes.

    Raises:
        ValueError: Mooncake is not installed, or the file is no configuration of it.
    """

    def __init__(self, settings: Path, frame_format: FrameFormat, namespace: bytes) -> None:
        self.format = frame_format
        self.counts = TierCounts()
        self._pool = Pool(settings, namespace)
        self._is_there = asyncio.Event()
        self._answers = False
        """Whether the master has answered the last call; the threads read and clear it."""
        self._is_closed = False
        self._seen = SecondUseAdmission(self.counts)
        self._finder, self._reader, self._writer, self._server = (
            # Look-ups have a thread of their own: a long restore would delay them.
            CallThread(name, doing, self.counts, lambda: self._answers, self._failed)
            for name, doing in (
                ("find", "finding KV blocks in Mooncake"),
                ("read", "reading KV blocks from Mooncake"),
                ("write", "writing KV blocks to Mooncake"),
                ("serve", "using Mooncake"),
            )
        )
        self._read_lane: list[Bytes] = []
        self._write_lane: list[Bytes] = []
        self._give_lane: list[Bytes] = []
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect())

    @property
    def blocks(self) -> None:
        """See `Tier.blocks`. Only Mooncake's master has it, on its metrics port."""
        return

    @property
    def used_bytes(self) -> None:
        """See `Tier.used_bytes`. As with `blocks`."""
        return

    def inventory(self) -> Sequence[bytes]:
        """See `Tier.inventory`. Empty: each engine queries Mooncake."""
        return ()

    async def connected(self) -> None:
        """Returns when the master answers."""
        await self._is_there.wait()

    async def lookup(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.lookup`."""
        if not chain or not self._is_there.is_set():
            return 0
        return await self._finder.run(lambda cancel: self._lead_of(chain), 0)

    async def read(
        self, chain: Sequence[BlockId], into: Sequence[Segments], access: Access, cancel: CancelToken | None = None
    ) -> int:
        """See `Tier.read`. The store itself records the use."""
        progress = Progress()
        wanted = chain[len(chain) - len(into) :]
        if self._is_there.is_set() and wanted:
            with contextlib.suppress(Cancelled):
                await self._reader.run(lambda cancel: self._restore(wanted, into, progress, cancel), None, cancel)
        self.counts.hits += progress.done
        self.counts.misses += len(into) - progress.done
        return progress.done

    async def write(
        self,
        chain: Sequence[BlockId],
        sources: Sequence[BlockSource],
        access: Access,
        cancel: CancelToken | None = None,
    ) -> int:
        """See `Tier.write`."""
        if not self._is_there.is_set():
            self.counts.rejected["there is no connection"] += len(sources)
            return 0
        first = len(chain) - len(sources)
        admitted = self._seen.admitted(self._keys(chain[first:]), access)
        if not admitted:
            return 0
        offered, contents = chain[: first + admitted], sources[:admitted]
        progress = Progress()
        try:
            reason = await self._writer.run(
                lambda cancel: self._store(offered, contents, progress, cancel), "the store failed", cancel
            )
        except Cancelled:
            reason = CANCELLED
        if progress.done < admitted:
            self.counts.rejected[reason] += admitted - progress.done
        return progress.done

    async def touch(self, chain: Sequence[BlockId], access: Access) -> None:
        """See `Tier.touch`. A look-up is a use."""
        await self.lookup(chain)

    async def pin(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.pin`. Mooncake pins only what is being written, so this pins nothing."""
        return 0

    async def unpin(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.unpin`."""
        return 0

    async def discard(self, chain: Sequence[BlockId], keep: int) -> int:
        """See `Tier.discard`. Asks the master also where it did not answer the last call.

        Descendants are no longer found, and are evicted by Mooncake in time.
        """

        def remove() -> int:
            gone = max(0, self._lead_of(chain) - keep)
            self._pool.remove(self._keys(chain[keep:]))
            return gone

        if not chain[keep:] or not self._pool.has_joined:
            return 0
        return await self._server.run(lambda cancel: remove(), 0, in_any_case=True)

    async def clear(self) -> int:
        """See `Tier.clear`. Blocks of this model, whichever engine wrote them. Asks the master as `discard`."""
        if not self._pool.has_joined:
            return 0
        return await self._server.run(lambda cancel: self._pool.clear(), 0, in_any_case=True)

    async def frame(self, key: bytes, parent: bytes) -> bytes | None:
        """See `Tier.frame`."""
        if not self._is_there.is_set():
            return None
        return await self._server.run(lambda cancel: self._give(key, parent), None)

    async def close(self) -> None:
        """See `Tier.close`. What other hosts' memory holds stays."""
        if self._is_closed:
            return
        self._is_closed = True
        self._is_there.clear()
        self._connecting.cancel()
        self._pool.give_up()
        await asyncio.wait((self._connecting,))
        callers = (self._finder, self._reader, self._writer)
        await asyncio.gather(*(caller.close() for caller in callers))
        # Leaving frees memory that a call may still use which waits for a host that hangs.
        has_left = not any(caller.is_busy for caller in callers) and await self._left()
        if not has_left:
            self._pool.abandon()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if has_left else 0.1):
                await self._server.close()

    async def _left(self) -> bool:
        """Leaves the store; returns whether that worked in time. True if it had not joined."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._server.run(lambda cancel: self._pool.leave(), None, in_any_case=True)
        return not self._pool.has_joined

    def _failed(self, error: OSError) -> None:
        """In a thread: the master has to be found again where it did not answer."""
        if error.errno in MASTER_ERRORS and self._answers:
            self._answers = False
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._find_again)

    def _find_again(self) -> None:
        if self._is_there.is_set() and not self._is_closed:
            self._is_there.clear()
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        """Retries: Mooncake may be started after this engine, or again."""
        while not self._is_there.is_set():
            if await self._server.run(lambda cancel: self._join(), False, in_any_case=True):
                self._answers = True
                self._is_there.set()
            else:
                await asyncio.sleep(_RETRY_SECONDS)

    def _join(self) -> bool:
        """Whether the master answers, and the store has been joined. Raises OSError."""
        if self._give_lane:
            self._pool.has([bytes(16)])
            return True
        if not self._pool.connect():
            return False
        frame_bytes = self.format.frame_bytes
        frames = max(1, _LANE_BYTES // frame_bytes)
        self._read_lane = self._pool.lane(frames, frame_bytes)
        self._write_lane = self._pool.lane(frames, frame_bytes)
        self._give_lane = self._pool.lane(1, frame_bytes)
        log.info("KV blocks are kept in Mooncake, too")
        return True

    def _lead_of(self, chain: Sequence[BlockId]) -> int:
        """Looks up all of them: there may be holes."""
        return _leading(self._pool.has(self._keys(chain)))

    def _restore(
        self, wanted: Sequence[BlockId], into: Sequence[Segments], progress: Progress, cancel: CancelToken
    ) -> None:
        """Restores up to the first missing or damaged block. Raises OSError."""
        began = time.perf_counter()
        lane = self._read_lane
        try:
            for start in range(0, len(wanted), len(lane)):
                batch = wanted[start : start + len(lane)]
                sizes = self._pool.load(self._keys(batch), lane[: len(batch)])
                for block, segments, frame, size in zip(batch, into[start:], lane, sizes, strict=False):
                    if size < 0:
                        raise failure(size)
                    if not size or not self._is_sound(block, frame, size):
                        return
                    with cancel:
                        self.format.decode(frame, segments)
                        progress.done += 1
        except Cancelled:
            pass  # progress.done is the number of restored blocks
        finally:
            self.counts.bytes_read += progress.done * self.format.frame_bytes
            self.counts.read_seconds += time.perf_counter() - began

    def _is_sound(self, block: BlockId, frame: Bytes, size: int) -> bool:
        try:
            if size != len(frame):
                raise BadFrame("frame bytes", len(frame), size)
            self.format.verify(block, frame)
        except BadFrame as error:
            self._quarantine(self.format.stored_key(block.key), error)
            return False
        return True

    def _store(
        self, chain: Sequence[BlockId], sources: Sequence[BlockSource], progress: Progress, cancel: CancelToken
    ) -> str:
        """Writes the last blocks as far as possible; returns the reason if not all. Raises OSError."""
        first = len(chain) - len(sources)
        has = self._pool.has(self._keys(chain))
        if not all(has[:first]):
            return "what comes before it is not here"
        lane = self._write_lane
        while progress.done < len(sources):
            progress.done += _leading(has[first + progress.done :])
            start = first + progress.done
            missing = _leading([not there for there in has[start : start + len(lane)]])
            reason, sealed = self._sealed(chain[start : start + missing], sources[start - first :], lane, cancel)
            saved = _leading(self._pool.save(self._keys(chain[start : start + sealed]), lane[:sealed])) if sealed else 0
            progress.done += saved
            self.counts.writes += saved
            self.counts.bytes_written += saved * self.format.frame_bytes
            if saved < sealed:
                return "there is no room"
            if reason:
                return reason
        return ""

    def _sealed(
        self, blocks: Sequence[BlockId], sources: Sequence[BlockSource], lane: list[Bytes], cancel: CancelToken
    ) -> tuple[str, int]:
        """Fills a lane with frames; returns the reason if it stops early, and how many."""
        for number, block in enumerate(blocks):
            try:
                with cancel:
                    self.format.seal(block, sources[number], lane[number])
            except CannotEncode as error:
                return str(error), number
            except Cancelled:
                return CANCELLED, number
        return "", len(blocks)

    def _give(self, key: bytes, parent: bytes) -> bytes | None:
        (frame,) = self._give_lane
        (size,) = self._pool.load([key], [frame])
        if size < 0:
            raise failure(size)
        if not size:
            return None
        try:
            if size != len(frame):
                raise BadFrame("frame bytes", len(frame), size)
            check_frame(frame.data, key, parent)
        except BadFrame as error:
            if error.field != "parent":  # the request was wrong, not the frame
                self._quarantine(key, error)
            return None
        return frame.tobytes()

    def _quarantine(self, key: bytes, error: BadFrame) -> None:
        """Removes a damaged frame. Raises OSError."""
        self.counts.bad_frames[error.field] += 1
        log.error("removing a block from Mooncake: %s", error)
        self._pool.remove([key])

    def _keys(self, chain: Sequence[BlockId]) -> list[bytes]:
        return [self.format.stored_key(block.key) for block in chain]


def _leading(are: Sequence[bool]) -> int:
    return next((place for place, is_so in enumerate(are) if not is_so), len(are))
