"""Host memory: its size, its release, and its safety with concurrent threads."""

import asyncio
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.frames.segments import Segments
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.host_memory import HostMemory
from prefix_store.tiers.slabs import Slabs, Slot
from prefix_store.tiers.worker import Worker
from tests.prefix_store.tiers.blocks import Memory, chain, format_of

MIB = 2**20


@given(steps=st.lists(st.integers(0, 30), max_size=120))
def test_slots_are_never_shared_and_never_more_than_there_is_room(steps: list[int]) -> None:
    """For any sequence: each slot has its own bytes, and slabs stay within the capacity."""
    slabs = Slabs(5 * MIB, 32 * MIB)
    held: list[Slot] = []
    for step in steps:
        if step < 20 or not held:
            slot = slabs.take()
            assert (slot is None) == (len(held) == slabs.capacity == 6)
            if slot is not None:
                slot.frame[:1] = len(held)
                held.append(slot)
        else:
            slabs.free_later(held.pop(step % len(held)))
        addresses = [slot.frame.ctypes.data for slot in held]
        assert all(abs(a - b) >= 5 * MIB for place, a in enumerate(addresses) for b in addresses[:place])
        assert slabs.allocated_bytes <= 32 * MIB
        assert slabs.used == len(held)


def test_memory_is_taken_as_it_is_needed_and_given_back() -> None:
    """Slabs are allocated singly; empty ones are freed, except one."""
    slabs = Slabs(MIB, 100 * MIB)
    assert slabs.allocated_bytes == 0
    slots = [slabs.take() for _ in range(33)]
    assert slabs.allocated_bytes == 48 * MIB
    for slot in slots:
        assert slot is not None
        slabs.free_later(slot)
    assert slabs.allocated_bytes == 16 * MIB


def test_a_slot_that_is_used_is_freed_when_nobody_uses_it_any_more() -> None:
    """Its memory is not reused until then, evicted or not."""
    slabs = Slabs(MIB, MIB)
    slot = slabs.take()
    assert slot is not None
    slabs.use(slot)
    slabs.free_later(slot)
    assert slabs.take() is None
    slabs.unuse(slot)
    assert slabs.take() is not None


def test_a_capacity_below_one_frame_is_refused() -> None:
    """The message has both numbers."""
    with pytest.raises(ValueError, match="999 bytes, expected at least 1,000: one block of this model"):
        Slabs(1000, 999)


async def test_clearing_gives_the_memory_back() -> None:
    """All blocks are misses then, and are reported as removed."""
    gone: list[bytes] = []
    form = format_of()
    tier = HostMemory(form, 100 * form.frame_bytes, LeastRecentlyUsed(), gone.extend)
    blocks = chain("a", 8)
    assert await tier.write(blocks, Memory(8).fill(blocks), Access(0.0)) == 8
    assert await tier.clear() == 8
    assert tier.blocks == await tier.lookup(blocks) == 0
    assert sorted(gone) == sorted(block.key for block in blocks)
    assert await tier.write(blocks, Memory(8).fill(blocks), Access(1.0)) == 8
    await tier.close()


async def test_a_bit_that_flips_in_memory_is_found() -> None:
    """The block's descendants are removed with it; the rest of the chain is restored."""
    form = format_of()
    tier = HostMemory(form, 100 * form.frame_bytes, LeastRecentlyUsed())
    blocks = chain("a", 8)
    await tier.write(blocks, Memory(8).fill(blocks), Access(0.0))
    tier._slots[blocks[5].key].frame[300] ^= 4
    memory = Memory(8)
    assert await tier.read(blocks, memory.all(8), Access(1.0)) == 5
    assert memory.is_untouched(5)
    assert tier.counts.bad_frames == {"checksum": 1}
    assert await tier.lookup(blocks) == 5
    await tier.close()


class _Slow:
    """Memory that reports when it is touched, and waits until it may continue."""

    def __init__(self) -> None:
        self.touched = threading.Event()
        self.go_on = threading.Event()

    def wait(self) -> None:
        self.touched.set()
        assert self.go_on.wait(10)


async def test_work_that_is_given_up_touches_nothing_afterwards() -> None:
    """A thread that returns after the cancellation cannot enter the token."""
    slow = _Slow()
    worker = Worker("test")
    touches = []

    def work(cancel: CancelToken) -> None:
        slow.wait()
        with cancel:
            touches.append(1)

    running = asyncio.create_task(worker.run(work))
    await asyncio.to_thread(slow.touched.wait)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    slow.go_on.set()
    await worker.close()
    assert touches == []


async def test_who_gives_up_in_the_middle_of_a_copy_waits_for_its_end() -> None:
    """Then the memory is free."""
    slow = _Slow()
    worker = Worker("test")
    ended = []

    def work(cancel: CancelToken) -> None:
        with cancel:
            slow.wait()
            ended.append(1)

    running = asyncio.create_task(worker.run(work))
    await asyncio.to_thread(slow.touched.wait)
    threading.Timer(0.1, slow.go_on.set).start()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended == [1]
    await worker.close()


def test_a_halt_interrupts_what_the_thread_waits_for() -> None:
    """The token may be set before or after `set_interrupt`."""
    calls: list[str] = []
    late, early = CancelToken(), CancelToken()
    late.set_interrupt(lambda: calls.append("late"))
    late.set()
    early.set()
    early.set_interrupt(lambda: calls.append("early"))
    assert calls == ["late", "early"]
    with pytest.raises(Cancelled), early:
        pass


async def test_a_block_that_has_to_go_while_it_is_written_is_not_there_afterwards() -> None:
    """Of two concurrent chains that do not both fit, the leading blocks are stored."""
    form = format_of()
    tier = HostMemory(form, 20 * 64 * -(-form.frame_bytes // 64), LeastRecentlyUsed())
    first, second = chain("a", 12), chain("b", 16)
    go_on = threading.Event()
    holding = asyncio.create_task(tier._writer.run(lambda cancel: go_on.wait(10)))
    writing = [
        asyncio.create_task(tier.write(blocks, Memory(16).fill(blocks), Access(float(time))))
        for time, blocks in enumerate((first, second))
    ]
    await asyncio.sleep(0)  # both are admitted, and wait for the thread
    go_on.set()
    kept = await asyncio.gather(*writing)
    await holding
    assert kept == [await tier.lookup(first), await tier.lookup(second)]
    assert kept[0] == 4
    assert set(tier._slots) == set(tier._tree)
    assert tier._slabs.used == tier.blocks == sum(kept)
    await tier.close()


async def test_writes_that_are_given_up_leave_nothing_behind() -> None:
    """A cancelled write leaves no blocks and no unused memory."""
    form = format_of()
    tier = HostMemory(form, 100 * form.frame_bytes, LeastRecentlyUsed())
    blocks = chain("a", 60)
    sources: list[Segments] = Memory(60).fill(blocks)
    for wait in range(8):
        writing = asyncio.create_task(tier.write(blocks, sources, Access(float(wait))))
        for _ in range(wait):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        left = await tier.lookup(blocks)
        memory = Memory(60)
        assert await tier.read(blocks, memory.all(60), Access(float(wait))) == left
        assert tier._slabs.used == tier.blocks == left
        assert tier._tree.problems() == []
    assert await tier.write(blocks, sources, Access(99.0)) == 60
    assert not np.array_equal(sources[0][0], sources[1][0])
    await tier.close()
