"""The contract of all tiers."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from prefix_store.codecs.registry import CODECS
from prefix_store.eviction.access import Access
from prefix_store.eviction.hazard import HazardPolicy
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy
from prefix_store.frames.block_id import BlockId
from prefix_store.tiers.tier import Tier
from tests.prefix_store.tiers.blocks import CAPACITY, Make, Memory, chain


async def kept(tier: Tier, blocks: list[BlockId], time: float = 0.0, **about: Any) -> int:
    memory = Memory(len(blocks))
    return await tier.write(blocks, memory.fill(blocks), Access(time, **about))


async def restored(tier: Tier, blocks: list[BlockId], time: float = 1.0) -> int:
    """The number of restored blocks, which are checked."""
    memory = Memory(len(blocks))
    count = await tier.read(blocks, memory.all(len(blocks)), Access(time))
    assert all(memory.holds(number, blocks[number]) for number in range(count))
    assert all(memory.is_untouched(number) for number in range(count, len(blocks)))
    return count


async def test_what_is_written_is_read(make: Make) -> None:
    """Reads return every bit, of the whole chain or of its end alone."""
    tier = await make()
    blocks = chain("a", 12)
    assert await kept(tier, blocks) == 12
    assert await restored(tier, blocks) == 12
    memory = Memory(4)
    assert await tier.read(blocks, memory.all(4), Access(2.0)) == 4
    assert all(memory.holds(number, blocks[8 + number]) for number in range(4))
    assert await tier.lookup(blocks) == 12
    assert tier.counts.hits == 16
    assert tier.counts.writes == 12


async def test_what_is_not_there_is_a_miss(make: Make) -> None:
    """No memory is touched, and the miss is counted."""
    tier = await make()
    await kept(tier, chain("a", 3))
    assert await restored(tier, chain("b", 5)) == 0
    assert await tier.lookup(chain("b", 5)) == 0
    assert tier.counts.misses == 5


async def test_a_chain_that_goes_on_elsewhere_is_read_as_far_as_it_is_known(make: Make) -> None:
    """The leading blocks shared by two prompts are read."""
    tier = await make()
    first = chain("a", 4)
    await kept(tier, first)
    other = chain("b", 9, root=first)
    assert await tier.lookup(other) == 4
    assert await restored(tier, other) == 4
    memory = Memory(9)
    assert await tier.write(other, memory.fill(other)[4:], Access(3.0)) == 5
    assert await restored(tier, other) == 9


@pytest.mark.parametrize("field", ["namespace", "tokens"])
async def test_a_block_of_another_model_or_text_is_a_miss_and_goes(make: Make, field: str) -> None:
    """A block with the same key and other contents is not returned, and is removed."""
    tier = await make()
    blocks = chain("a", 6)
    await kept(tier, blocks)
    asked = list(blocks)
    names = {name: getattr(blocks[2], name) for name in ("namespace", "key", "parent", "tokens")}
    asked[2] = BlockId(**{**names, field: b"x" * 16})
    assert await restored(tier, asked) == 2
    assert tier.counts.bad_frames == {field: 1}
    assert await restored(tier, blocks) == 2
    assert await kept(tier, blocks, 2.0) == 6
    assert await restored(tier, blocks) == 6


async def test_blocks_after_a_gap_are_not_kept(make: Make) -> None:
    """A chain has no holes: unreachable blocks are not stored."""
    tier = await make()
    blocks = chain("a", 6)
    memory = Memory(6)
    sources = memory.fill(blocks)
    assert await tier.write(blocks, sources[3:], Access(0.0)) == 0
    assert tier.counts.rejected == {"what comes before it is not here": 3}
    assert await kept(tier, blocks[:3]) == 3
    assert await tier.write(blocks, sources[3:], Access(1.0)) == 3


async def test_what_is_there_is_not_written_again(make: Make) -> None:
    """A chain that is offered twice is only looked up."""
    tier = await make()
    blocks = chain("a", 5)
    assert await kept(tier, blocks) == 5
    assert await kept(tier, blocks, 1.0) == 5
    assert tier.counts.writes == 5


async def test_a_tier_keeps_what_was_used_last_and_evicts_tails_first(own: Make) -> None:
    """There is always space for new blocks, and the rest of a chain is its leading blocks."""
    gone: list[bytes] = []
    tier = await own(removed=gone.extend)
    hot = chain("hot", 8)
    await kept(tier, hot)
    cold = [chain(f"cold {number}", 16) for number in range(8)]
    for number, blocks in enumerate(cold):
        await kept(tier, blocks, float(number))
        assert await restored(tier, hot, number + 0.5) == 8
    assert await restored(tier, cold[-1], 99.0) == 16
    assert tier.counts.evictions == len(gone) >= 8 * 17 - CAPACITY
    assert {block.key for block in cold[0]} <= set(gone)
    for blocks in cold:
        left = [block.key not in gone for block in blocks]
        assert left == sorted(left, reverse=True)
        assert await restored(tier, blocks, 100.0) == sum(left)


async def test_a_one_shot_is_kept_when_it_comes_again(make: Make) -> None:
    """Blocks of a one-shot prompt are written at their second use."""
    tier = await make()
    blocks = chain("a", 5)
    assert await kept(tier, blocks, one_shot=True) == 0
    assert tier.counts.writes == 0
    assert tier.counts.rejected == {"not admitted": 5}
    assert await kept(tier, blocks, 1.0, one_shot=True) == 5
    assert await restored(tier, blocks) == 5


@pytest.mark.parametrize("codec", CODECS)
async def test_a_form_is_found_under_its_own_key_alone(make: Make, codec: str) -> None:
    """A look-up by the block's own key finds the exact form only."""
    tier = await make(CODECS[codec])
    blocks = chain("a", 2)
    assert await kept(tier, blocks) == 2
    form = tier.format
    assert await tier.frame(form.stored_key(blocks[1].key), form.stored_key(blocks[1].parent)) is not None
    assert (await tier.frame(blocks[1].key, blocks[1].parent) is not None) == CODECS[codec].is_exact


async def test_frames_are_given_by_both_of_their_hashes(make: Make) -> None:
    """`frame` returns a whole frame or None."""
    tier = await make()
    blocks = chain("a", 2)
    await kept(tier, blocks)
    frame = await tier.frame(blocks[1].key, blocks[1].parent)
    assert frame is not None
    assert len(frame) == tier.format.frame_bytes
    assert await tier.frame(blocks[1].key, blocks[0].parent) is None
    assert await tier.frame(b"x" * 16, blocks[0].parent) is None


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, HazardPolicy])
async def test_many_at_once_get_what_they_asked_for(make: Make, policy: Callable[[], Policy]) -> None:
    """Concurrent reads and writes are correct while the tier evicts all the time."""
    tier = await make(policy=policy)
    shared = chain("shared", 6)
    chains = [chain(f"{number}", 12, root=shared) for number in range(12)]

    async def one(number: int) -> None:
        for turn in range(6):
            blocks = chains[(number + turn) % len(chains)]
            count = await restored(tier, blocks, turn)
            memory = Memory(12)
            access = Access(float(turn))
            await tier.write(blocks, memory.fill(blocks)[count:], access)
            access.end(10 * number)

    await asyncio.gather(*(one(number) for number in range(8)))
    assert tier.counts.hits
    assert not tier.counts.bad_frames
    assert not tier.counts.io_errors


async def test_a_block_that_cannot_be_written_is_dropped(make: Make) -> None:
    """Only this block is dropped; earlier ones stay."""
    tier = await make(CODECS["int8"])
    blocks = chain("a", 4)
    memory = Memory(4)
    sources = memory.fill(blocks)
    memory.bytes[1, 1, 2, :2] = (0x00, 0x7C)  # float16 infinity
    assert await tier.write(blocks, sources, Access(0.0)) == 2
    assert await tier.lookup(blocks) == 2


async def test_what_is_touched_stays(own: Make) -> None:
    """A touch counts as a use of blocks that an engine has in its own memory."""
    tier = await own()
    hot = chain("hot", 8)
    await kept(tier, hot)
    beyond = chain("beyond", 3, root=hot)
    cold = [chain(f"cold {number}", 16) for number in range(8)]
    for number, blocks in enumerate(cold):
        await kept(tier, blocks, float(number))
        await tier.touch(beyond, Access(number + 0.5))
    assert tier.counts.evictions
    assert await tier.lookup(beyond) == 8
    assert tier.counts.hits == tier.counts.misses == 0
