"""Frames in the memory of this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prefix_store.codecs.codec import CannotEncode
from prefix_store.codecs.frame_format import BlockSource, FrameFormat, SealedBlock
from prefix_store.eviction.access import Access
from prefix_store.eviction.pins import Pins
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import BadFrame, check_frame
from prefix_store.frames.segments import Segments
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import CANCELLED, Progress, TierCounts
from prefix_store.tiers.slabs import Slabs, Slot
from prefix_store.tiers.worker import Worker

log = logging.getLogger(__name__)

_CLEARED_AT_ONCE = 500


@dataclass(slots=True)
class _Outcome(Progress):
    """A thread's progress, and its error."""

    seconds: float = 0.0
    error: BadFrame | None = None


class HostMemory:
    """A `Tier` in memory. Its contents end with the process.

    The event loop keeps the state; threads, one each for reading, writing and serving, copy and compute checksums
    without the GIL. While a slot is read, filled or lent its memory is not reused, even after an eviction.

    Args:
        policy: which blocks stay; for this tier alone.
        on_removed: called with the stored keys of removed blocks, for the index.

    Raises:
        ValueError: there is not room for one frame.
    """

    def __init__(
        self,
        frame_format: FrameFormat,
        capacity_bytes: int,
        policy: Policy,
        on_removed: Callable[[Sequence[bytes]], None] = lambda keys: None,
    ) -> None:
        self.format = frame_format
        self.counts = TierCounts()
        self._slabs = Slabs(frame_format.frame_bytes, capacity_bytes)
        self._tree: BlockTree[bytes] = BlockTree(self._slabs.capacity, policy)
        self._pins = Pins(self._tree, self._slabs.capacity // 2)
        self._slots: dict[bytes, Slot] = {}
        self._filling: set[bytes] = set()
        self._on_removed = on_removed
        self._reader = Worker("kv-host-read")
        self._writer = Worker("kv-host-write", is_urgent=False)
        self._server = Worker("kv-host-serve")

    @property
    def capacity(self) -> int:
        """Blocks that there is room for."""
        return self._slabs.capacity

    @property
    def blocks(self) -> int:
        """See `Tier.blocks`."""
        return len(self._slots)

    @property
    def used_bytes(self) -> int:
        """See `Tier.used_bytes`."""
        return len(self._slots) * self.format.frame_bytes

    def inventory(self) -> Sequence[bytes]:
        """See `Tier.inventory`. As of now."""
        # A block is added after its parent and removed before it, so the dictionary has this order.
        return tuple(self._slots)

    @property
    def allocated_bytes(self) -> int:
        """Memory that is held for frames, used or not."""
        return self._slabs.allocated_bytes

    async def lookup(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.lookup`."""
        return self._lead_of(self._keys(chain))

    async def read(
        self, chain: Sequence[BlockId], into: Sequence[Segments], access: Access, cancel: CancelToken | None = None
    ) -> int:
        """See `Tier.read`."""
        first = len(chain) - len(into)
        wanted = chain[first:]
        keys = self._keys(wanted)
        slots = [self._slots[key] for key in keys[: self._lead_of(keys)]]
        outcome = _Outcome()
        if slots:
            self._use(self._keys(chain[: first + len(slots)]), access)
            self._hold(slots)
            try:
                await self._reader.run(lambda cancel: self._restore(wanted, slots, into, outcome, cancel), cancel)
            except Cancelled:
                pass  # outcome.done is the number of restored blocks
            finally:
                self._release(slots)
        self.counts.hits += outcome.done
        self.counts.misses += len(wanted) - outcome.done
        self.counts.bytes_read += outcome.done * self.format.frame_bytes
        self.counts.read_seconds += outcome.seconds
        if outcome.error is not None:
            self._quarantine(self.format.stored_key(wanted[outcome.done].key), outcome.error)
        return outcome.done

    async def write(
        self,
        chain: Sequence[BlockId],
        sources: Sequence[BlockSource],
        access: Access,
        cancel: CancelToken | None = None,
    ) -> int:
        """See `Tier.write`."""
        keys = self._keys(chain)
        first = len(keys) - len(sources)
        if self._tree.lookup(keys[:first]) < first:
            self.counts.rejected["what comes before it is not here"] += len(sources)
            return 0
        self._use(keys, access)
        slots = self._slots_for(keys[first:])
        reason = await self._fill(chain[first:], sources, slots, cancel) if slots else ""
        kept = self._lead_of(keys[first:])
        if kept < len(sources):
            self.counts.rejected[reason or "not admitted"] += len(sources) - kept
        return kept

    @contextlib.contextmanager
    def lend(self, chain: Sequence[BlockId], sources: Sequence[Segments]) -> Iterator[Sequence[BlockSource]]:
        """The last blocks of a chain for other tiers; the frames of those that are here are unchanged until the end."""
        keys = self._keys(chain[len(chain) - len(sources) :])
        slots = [self._slots[key] for key in keys[: self._lead_of(keys)]]
        self._hold(slots)
        try:
            sealed = [SealedBlock(self.format, slot.frame, one) for slot, one in zip(slots, sources, strict=False)]
            yield [*sealed, *sources[len(sealed) :]]
        finally:
            self._release(slots)

    async def frame(self, key: bytes, parent: bytes) -> bytes | None:
        """See `Tier.frame`."""
        slot = self._slots.get(key)
        if slot is None:
            return None

        def copy(cancel: CancelToken) -> bytes:
            check_frame(slot.frame.data, key, parent)
            return slot.frame.tobytes()

        self._hold([slot])
        try:
            return await self._server.run(copy)
        except BadFrame as error:
            if error.field != "parent":  # the request was wrong, not the frame
                self._quarantine(key, error)
            return None
        finally:
            self._release([slot])

    async def touch(self, chain: Sequence[BlockId], access: Access) -> None:
        """See `Tier.touch`."""
        keys = self._keys(chain)
        self._use(keys[: self._tree.lookup(keys)], access)

    async def pin(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.pin`. Ends with the process."""
        keys = self._keys(chain)
        return self._pins.pin(keys[: self._lead_of(keys)])

    async def unpin(self, chain: Sequence[BlockId]) -> int:
        """See `Tier.unpin`."""
        return self._pins.unpin(self._keys(chain))

    async def discard(self, chain: Sequence[BlockId], keep: int) -> int:
        """See `Tier.discard`."""
        keys = self._keys(chain)
        gone = max(0, self._lead_of(keys) - keep)
        if keep < len(keys):
            self._drop(self._tree.remove(keys[keep]))
        return gone

    async def clear(self) -> int:
        """See `Tier.clear`."""
        gone = waited = 0
        for key in list(self._tree):
            before = len(self._slots)
            self._drop(self._tree.remove(key))
            gone += before - len(self._slots)
            if gone - waited > _CLEARED_AT_ONCE:
                waited = gone
                await asyncio.sleep(0)
        return gone

    async def close(self) -> None:
        """See `Tier.close`."""
        await asyncio.gather(*(worker.close() for worker in (self._reader, self._writer, self._server)))

    def _restore(
        self,
        wanted: Sequence[BlockId],
        slots: Sequence[Slot],
        into: Sequence[Segments],
        outcome: _Outcome,
        cancel: CancelToken,
    ) -> None:
        began = time.perf_counter()
        for block, slot, segments in zip(wanted, slots, into, strict=False):
            try:
                self.format.verify(block, slot.frame)
            except BadFrame as error:
                outcome.error = error
                break
            with cancel:
                self.format.decode(slot.frame, segments)
                outcome.done += 1
                outcome.seconds = time.perf_counter() - began

    async def _fill(
        self,
        chain: Sequence[BlockId],
        sources: Sequence[BlockSource],
        slots: dict[int, Slot],
        cancel: CancelToken | None,
    ) -> str:
        """Seals the blocks at these places of a chain into their slots; returns the reason if not all."""
        done: list[int] = []

        def seal(cancel: CancelToken) -> None:
            for place, slot in slots.items():
                with cancel:
                    self.format.seal(chain[place], sources[place], slot.frame)
                    done.append(place)

        try:
            await self._writer.run(seal, cancel)
        except CannotEncode as error:
            return str(error)
        except Cancelled:
            return CANCELLED
        finally:
            for place, slot in slots.items():
                self._settle(self.format.stored_key(chain[place].key), slot, place in done)
        return ""

    def _slots_for(self, keys: Sequence[bytes]) -> dict[int, Slot]:
        """Slots, by place, for admitted blocks that are neither stored nor being filled."""
        slots: dict[int, Slot] = {}
        for place, key in enumerate(keys):
            if key not in self._tree:
                break
            if key in self._slots or key in self._filling:
                continue
            slot = self._slabs.take()
            if slot is None:  # evicted slots are still being read
                self._drop(self._tree.remove(key))
                break
            self._filling.add(key)
            slots[place] = slot
        return slots

    def _settle(self, key: bytes, slot: Slot, is_sealed: bool) -> None:
        """Makes a filled slot readable, unless the block was evicted meanwhile."""
        self._filling.discard(key)
        if is_sealed and key in self._tree:
            self._slots[key] = slot
            self.counts.writes += 1
            self.counts.bytes_written += self.format.frame_bytes
            return
        self._slabs.free_later(slot)
        self._drop(self._tree.remove(key))

    def _use(self, keys: Sequence[bytes], access: Access) -> None:
        victims = self._tree.use(keys, access)
        self.counts.evictions += len(victims)
        self._drop(victims)

    def _quarantine(self, key: bytes, error: BadFrame) -> None:
        self.counts.bad_frames[error.field] += 1
        log.error("a block in memory is not what was written: %s", error)
        self._drop(self._tree.remove(key))

    def _drop(self, keys: Sequence[bytes]) -> None:
        """Frees removed blocks; those that are being filled are freed afterwards."""
        self._pins.forget(keys)
        gone = [key for key in keys if key in self._slots]
        for key in gone:
            self._slabs.free_later(self._slots.pop(key))
        if gone:
            self._on_removed(gone)

    def _hold(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._slabs.use(slot)

    def _release(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._slabs.unuse(slot)

    def _keys(self, chain: Sequence[BlockId]) -> list[bytes]:
        return [self.format.stored_key(block.key) for block in chain]

    def _lead_of(self, keys: Sequence[bytes]) -> int:
        return next((place for place, key in enumerate(keys) if key not in self._slots), len(keys))
