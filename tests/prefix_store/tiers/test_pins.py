"""Pinned, discarded and cleared blocks of a tier."""

import asyncio
from pathlib import Path

from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.folder_session import put_pin
from prefix_store.tiers.tier import Tier
from tests.prefix_store.tiers.blocks import CAPACITY, Make, chain, format_of
from tests.prefix_store.tiers.test_contract import kept, restored
from tests.prefix_store.tiers.waiting import until

FORMAT = format_of()


async def fill(tier: Tier, name: str, time: float = 10.0) -> None:
    """Writes more than the capacity."""
    for number in range(6):
        await kept(tier, chain(f"{name} {number}", 12), time + number)


async def test_what_is_pinned_stays_until_it_is_unpinned(own: Make) -> None:
    """Its ancestors stay with it."""
    gone: list[bytes] = []
    tier = await own(removed=gone.extend)
    blocks = chain("a", 12)
    await kept(tier, blocks)
    assert await tier.pin(blocks[:10]) == 10
    await fill(tier, "b")
    assert await tier.lookup(blocks) >= 10
    assert {block.key for block in blocks[:10]}.isdisjoint(gone)
    assert await restored(tier, blocks[:10], 20.0) == 10
    assert await tier.unpin(blocks) == 10
    assert await tier.unpin(blocks) == 0
    await fill(tier, "c", 30.0)
    assert await tier.lookup(blocks) < 10


async def test_pins_keep_at_most_half(own: Make) -> None:
    """Beyond that only leading blocks of a chain are pinned, or none."""
    tier = await own()
    first, second = chain("a", 25), chain("b", 25)
    await kept(tier, first)
    await kept(tier, second)
    assert await tier.pin(first) == 25
    assert await tier.pin(second) == CAPACITY // 2 - 25
    assert await tier.pin(chain("c", 5, root=first[:2])) == 2
    await kept(tier, chain("d", 1))
    assert await tier.pin(chain("d", 1)) == 0
    await fill(tier, "e")
    assert await tier.lookup(first) == 25
    assert 7 <= await tier.lookup(second) < 25
    assert await tier.unpin(first) == 25
    assert await tier.pin(chain("e 5", 12)) == 12


async def test_only_what_is_there_is_pinned(own: Make) -> None:
    """Blocks that are not stored cannot be pinned."""
    tier = await own()
    blocks = chain("a", 8)
    assert await tier.pin(blocks) == 0
    await kept(tier, blocks[:3])
    assert await tier.pin(blocks) == 3
    assert await tier.unpin(blocks) == 3


async def test_what_two_pinned_chains_share_stays_while_one_is(own: Make) -> None:
    """Unpinning a chain keeps a pin in the middle of another one."""
    tier = await own()
    root = chain("root", 6)
    first, second = chain("a", 10, root=root), chain("b", 10, root=root)
    await kept(tier, first)
    await kept(tier, second)
    assert await tier.pin(first) == await tier.pin(second) == 10
    assert await tier.unpin(first) == 10
    await fill(tier, "c")
    assert await tier.lookup(second) == 10
    assert await tier.lookup(first) == 6


async def test_a_prefix_that_was_wrong_is_discarded(own: Make) -> None:
    """Its descendants are removed, pinned or not; ancestors stay, and it can be written again."""
    gone: list[bytes] = []
    tier = await own(removed=gone.extend)
    blocks = chain("a", 10)
    branch = chain("b", 8, root=blocks[:6])
    before = chain("c", 5, root=blocks[:3])
    for number, each in enumerate((blocks, branch, before)):
        await kept(tier, each, float(number))
    await tier.pin(branch)
    assert await tier.discard(blocks, 4) == 6
    wrong = {block.key for block in blocks[4:]} | {block.key for block in branch[6:]}
    await until(lambda: set(gone) == wrong, "the index hears of it")
    assert [await tier.lookup(each) for each in (blocks, branch, before)] == [4, 4, 5]
    assert set(tier.inventory()) == {block.key for block in [*blocks[:4], *before[3:]]}
    assert await tier.discard(blocks, 4) == 0
    assert await tier.unpin(branch) == 0
    assert await kept(tier, blocks, 9.0) == 10
    assert await restored(tier, blocks, 10.0) == 10


async def test_everything_can_be_removed(own: Make) -> None:
    """Pinned blocks, too; the removals are reported, and the whole capacity is free."""
    gone: list[bytes] = []
    tier = await own(removed=gone.extend)
    chains = [chain(f"{number}", 10) for number in range(4)]
    for number, blocks in enumerate(chains):
        await kept(tier, blocks, float(number))
    await tier.pin(chains[0])
    assert await tier.clear() == 40
    assert tier.blocks == 0
    await until(lambda: set(gone) == {block.key for blocks in chains for block in blocks}, "the index hears of it")
    assert [await tier.lookup(blocks) for blocks in chains] == [0] * 4
    assert await tier.clear() == 0
    for number, blocks in enumerate(chains):
        assert await kept(tier, blocks, 10.0 + number) == 10
    assert await tier.pin(chains[1]) == 10


def disk(path: Path, frames: int = CAPACITY) -> DiskTier:
    return DiskTier(path, FORMAT, frames * FORMAT.frame_bytes, LeastRecentlyUsed)


async def test_a_disk_keeps_pins_whoever_keeps_the_folder(tmp_path: Path) -> None:
    """A pin of any process holds after a change of the evictor, and after a restart of all."""
    first, second = disk(tmp_path / "kv", 96), disk(tmp_path / "kv", 96)
    await until(lambda: first.is_evictor or second.is_evictor, "the folder has an evictor")
    evictor, other = (first, second) if first.is_evictor else (second, first)
    blocks = chain("a", 10)
    await kept(other, blocks)
    assert await other.pin(blocks) == 10
    await fill(other, "b")
    await fill(other, "b again", 20.0)
    assert await other.lookup(blocks) == 10
    await evictor.close()
    await fill(other, "c")
    await fill(other, "c again", 20.0)
    assert other.is_evictor
    assert await other.lookup(blocks) == 10
    await other.close()
    after = disk(tmp_path / "kv", 64)  # so that not all of it fits
    await fill(after, "d")
    assert await after.lookup(blocks) == 10
    assert await after.unpin(blocks) == 10
    await fill(after, "e")
    assert await after.lookup(blocks) < 10
    await after.close()


async def test_pins_that_cannot_hold_are_taken_out(tmp_path: Path) -> None:
    """Pins of missing blocks, and those beyond half of a reduced capacity, are removed."""
    before = disk(tmp_path / "kv", 192)
    blocks = chain("a", 40)
    await kept(before, blocks)
    assert await before.pin(blocks) == 40
    await before.close()
    folder = Folder.find(tmp_path / "kv")
    put_pin(folder, BlockName(b"x" * 16, b"y" * 16, False))
    after = disk(tmp_path / "kv", 64)
    await until(lambda: len(folder.pinned()) == 1 and after.is_evictor, "they have been taken out")
    assert folder.pinned()[0].key == blocks[31].key
    await after.close()


async def test_who_pins_and_who_evicts_at_once_agree(tmp_path: Path) -> None:
    """Blocks that were reported as pinned stay."""
    first, second = disk(tmp_path / "kv"), disk(tmp_path / "kv")
    filling = asyncio.create_task(fill(first, "b"))
    for number in range(3):
        blocks = chain(f"a {number}", 8)
        await kept(second, blocks, 50.0)
        count = await second.pin(blocks)
        await fill(second, f"c {number}", 60.0)
        assert await first.lookup(blocks) >= count
        assert await second.unpin(blocks) == count
    await filling
    await first.close()
    await second.close()


async def test_a_folder_whose_pins_are_away_is_kept_all_the_same(tmp_path: Path) -> None:
    """Pins fail and are counted, eviction continues, and the next start repairs the folder."""
    tier = disk(tmp_path / "kv")
    blocks = chain("a", 10)
    await kept(tier, blocks)
    assert await tier.pin(blocks) == 10
    (tmp_path / "kv" / "pins" / next((tmp_path / "kv" / "pins").iterdir()).name).unlink()
    (tmp_path / "kv" / "pins").rmdir()
    assert await tier.pin(blocks) == 0
    assert tier.counts.io_errors == {"ENOENT": 1}
    await fill(tier, "b")
    assert await tier.lookup(chain("b 5", 12)) == 12
    await tier.close()
    after = disk(tmp_path / "kv")
    assert await after.pin(chain("b 5", 12)) == 12
    await fill(after, "c")
    assert await after.lookup(blocks) < 10
    await after.close()
