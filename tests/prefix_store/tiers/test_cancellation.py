"""Cancellation while a tier reads into memory or writes from it."""

import asyncio
import threading

import numpy as np
import pytest

from prefix_store.codecs.plain import Plain
from prefix_store.eviction.access import Access
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.counts import CANCELLED
from prefix_store.tiers.tier import Tier
from prefix_store.tiers.worker import Worker
from tests.prefix_store.tiers.blocks import Make, Memory, chain
from tests.prefix_store.tiers.waiting import until


class Stopping(Plain):
    """Stops in the middle of a later block until it may continue."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.go_on = threading.Event()
        self.blocks_left = -1

    def encode(self, segments: Segments, layout: BlockLayout, payload: Bytes) -> None:
        super().encode(segments, layout, payload)
        self._come_to_one()

    def decode(self, payload: Bytes, layout: BlockLayout, into: Segments) -> None:
        self._come_to_one()
        super().decode(payload, layout, into)

    def _come_to_one(self) -> None:
        self.blocks_left -= 1
        if self.blocks_left == -1:
            self.stopped.set()
            assert self.go_on.wait(10)


def worker_of(tier: Tier, side: str) -> Worker:
    worker = getattr(tier, side)
    worker = getattr(worker, "_worker", worker)
    assert isinstance(worker, Worker)
    return worker


async def test_a_read_ends_with_the_block_that_is_being_copied(make: Make) -> None:
    """The cancellation waits for that block; later memory is unchanged."""
    codec = Stopping()
    tier, blocks, cancel = await make(codec), chain("a", 6), CancelToken()
    await tier.write(blocks, Memory(6).fill(blocks), Access(0.0))
    memory = Memory(6)
    codec.blocks_left = 2
    reading = asyncio.create_task(tier.read(blocks, memory.all(6), Access(1.0), cancel))
    await asyncio.to_thread(codec.stopped.wait, 10)
    setting = asyncio.create_task(asyncio.to_thread(cancel.set))
    await asyncio.wait({setting}, timeout=0.05)
    assert not setting.done()
    codec.go_on.set()
    await setting
    was = memory.bytes.copy()
    assert await reading == 3
    assert all(memory.holds(place, blocks[place]) for place in range(3))
    assert memory.is_untouched(3)
    assert (tier.counts.hits, tier.counts.misses) == (3, 3)
    assert await tier.read(blocks, Memory(6).all(6), Access(2.0)) == 6
    assert np.array_equal(memory.bytes, was)


async def test_a_write_ends_with_the_block_that_is_being_copied(make: Make) -> None:
    """Blocks that were sealed until then are stored and correct."""
    codec = Stopping()
    tier, blocks, cancel, source = await make(codec), chain("a", 6), CancelToken(), Memory(6)
    codec.blocks_left = 2
    writing = asyncio.create_task(tier.write(blocks, source.fill(blocks), Access(0.0), cancel))
    await asyncio.to_thread(codec.stopped.wait, 10)
    setting = asyncio.create_task(asyncio.to_thread(cancel.set))
    await asyncio.wait({setting}, timeout=0.05)
    assert not setting.done()
    codec.go_on.set()
    await setting
    source.bytes[:] = 0
    kept = await writing
    # The thread may still be storing the block that it sealed last, or, for Mooncake, all of them.
    assert kept <= 3
    assert tier.counts.rejected == {CANCELLED: 6 - kept}
    await worker_of(tier, "_writer").run(lambda cancel: None)
    assert await tier.lookup(blocks) == 3
    memory = Memory(6)
    assert await tier.read(blocks, memory.all(6), Access(1.0)) == 3
    assert all(memory.holds(place, blocks[place]) for place in range(3))
    assert not tier.counts.bad_frames


@pytest.mark.parametrize("side", ["_reader", "_writer"])
async def test_what_is_taken_back_before_its_turn_is_not_begun(make: Make, side: str) -> None:
    """A cancellation does not wait for a hanging or busy thread."""
    tier, blocks, cancel = await make(), chain("a", 4), CancelToken()
    source, memory = Memory(4), Memory(4)
    if side == "_reader":
        await tier.write(blocks, source.fill(blocks), Access(0.0))
    hangs, go_on = threading.Event(), threading.Event()

    def hang(cancel: CancelToken) -> None:
        hangs.set()
        assert go_on.wait(10)

    hanging = asyncio.create_task(worker_of(tier, side).run(hang))
    await until(hangs.is_set, "the thread hangs")
    if side == "_reader":
        working = asyncio.create_task(tier.read(blocks, memory.all(4), Access(1.0), cancel))
    else:
        working = asyncio.create_task(tier.write(blocks, source.fill(blocks), Access(1.0), cancel))
    await asyncio.sleep(0)
    await asyncio.to_thread(cancel.set)
    assert await asyncio.wait_for(working, 5) == 0
    assert not hanging.done()
    go_on.set()
    await hanging
    await worker_of(tier, side).run(lambda cancel: None)
    assert memory.is_untouched(0)
    assert tier.counts.writes == (4 if side == "_reader" else 0)


async def test_memory_that_was_taken_back_already_is_not_touched(make: Make) -> None:
    """The tier still serves other requests."""
    tier, blocks, cancel = await make(), chain("a", 4), CancelToken()
    cancel.set()
    assert await tier.write(blocks, Memory(4).fill(blocks), Access(0.0), cancel) == 0
    assert tier.counts.rejected == {CANCELLED: 4}
    assert await tier.write(blocks, Memory(4).fill(blocks), Access(1.0)) == 4
    memory = Memory(4)
    assert await tier.read(blocks, memory.all(4), Access(2.0), cancel) == 0
    assert memory.is_untouched(0)
    assert await tier.read(blocks, memory.all(4), Access(3.0)) == 4


async def test_who_cancels_one_read_gives_up_no_other(make: Make) -> None:
    """Both reads have the same token."""
    codec = Stopping()
    tier, blocks, cancel = await make(codec), chain("a", 4), CancelToken()
    await tier.write(blocks, Memory(4).fill(blocks), Access(0.0))
    codec.blocks_left = 0
    first, second = Memory(4), Memory(4)
    cancelled = asyncio.create_task(tier.read(blocks, first.all(4), Access(1.0), cancel))
    other = asyncio.create_task(tier.read(blocks, second.all(4), Access(1.0), cancel))
    await asyncio.to_thread(codec.stopped.wait, 10)
    cancelled.cancel()
    threading.Timer(0.05, codec.go_on.set).start()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await other == 4
    assert first.is_untouched(1)


async def test_memory_is_nobodys_whenever_it_is_taken_back(make: Make) -> None:
    """After a cancellation at any time memory does not change, and restored blocks are correct."""
    tier, blocks = await make(), chain("a", 40)
    await tier.write(blocks, Memory(40).fill(blocks), Access(0.0))
    counts = set()
    for turn in range(40):
        memory, cancel = Memory(40), CancelToken()
        then: list[Bytes] = []

        def take_back(memory: Memory = memory, cancel: CancelToken = cancel, then: list[Bytes] = then) -> None:
            cancel.set()
            then.append(memory.bytes.copy())

        timer = threading.Timer(turn * 0.0002, take_back)
        timer.start()
        count = await tier.read(blocks, memory.all(40), Access(1.0 + turn), cancel)
        await asyncio.to_thread(timer.join)
        counts.add(count)
        assert all(memory.holds(place, blocks[place]) for place in range(count))
        assert all(memory.is_untouched(place) for place in range(count, 40))
        assert np.array_equal(then[0], memory.bytes)
    assert not tier.counts.bad_frames
