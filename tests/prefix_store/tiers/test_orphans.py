"""Blocks whose parents were removed or are not known yet: they are not found, but use space."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.frames.block_id import BlockId
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.folder_session import FolderSession
from tests.prefix_store.tiers.blocks import chain, format_of
from tests.prefix_store.tiers.test_contract import kept
from tests.prefix_store.tiers.waiting import until

FORMAT = format_of()
CAPACITY = 128 * FORMAT.frame_bytes


class Full:
    """A folder that is full, its evictor, and one more process that writes."""

    def __init__(self, path: Path) -> None:
        self.removed: list[bytes] = []
        self.tier = DiskTier(path, FORMAT, CAPACITY, LeastRecentlyUsed, self.removed.extend)
        self.other = FolderSession(Folder.open(path))
        self._path = path

    @property
    def bytes(self) -> int:
        return len(list((self._path / "blocks").glob("*/*"))) * FORMAT.frame_bytes

    async def write(self, block: BlockId, *, is_first: bool = False) -> None:
        """Writes as soon as there is space."""
        await until(lambda: self.other.may_write(FORMAT.frame_bytes), "there is room")
        self.other.save(BlockName(block.key, block.parent, is_first), np.zeros(FORMAT.frame_bytes, np.uint8))

    def has(self, block: BlockId) -> bool:
        return self.other.has(BlockName(block.key, block.parent, is_first=False))


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[Full]:
    made = Full(tmp_path / "kv")
    await until(lambda: made.tier.is_evictor, "the folder has an evictor")
    for number in range(8):
        await kept(made.tier, chain(f"{number}", 20), float(number))
    yield made
    made.other.close()
    await made.tier.close()


async def test_orphans_do_not_take_more_room_than_there_is(full: Full) -> None:
    """A process that writes many orphans waits until the first of them are removed."""
    most = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2.5):
            for number in range(60):
                await full.write(chain(f"orphan {number}", 2)[1])
                most = max(most, full.bytes)
    assert 100 * FORMAT.frame_bytes < most <= CAPACITY


async def test_an_orphan_goes_and_its_tier_says_so(full: Full) -> None:
    """It is removed after a second, or sooner if its parent was evicted."""
    orphan, bereaved = chain("orphan", 2)[1], chain("0", 21)[20]
    parent = chain("0", 20)[19]
    assert parent.key in full.removed
    await full.write(orphan)
    await full.write(bereaved)
    await until(lambda: not full.has(bereaved), "it has no parent any more")
    assert full.has(orphan)
    await until(lambda: not full.has(orphan), "its parent does not come")
    await until(lambda: {orphan.key, bereaved.key} <= set(full.removed), "the tier has said so")


async def test_a_child_whose_parent_is_heard_of_later_stays(full: Full) -> None:
    """The parent's journal is read later; an earlier removal of the parent makes no difference."""
    parent, child = chain("0", 20)[0], chain("0", 20)[1]
    await full.tier.discard([parent], 0)
    await until(lambda: parent.key in full.removed, "the parent is gone")
    await full.write(child)
    await full.write(parent, is_first=True)
    evictor = full.tier._maintenance.evictor
    assert evictor is not None
    await until(lambda: child.key in evictor._names, "both are in the books")
    assert full.has(child)
