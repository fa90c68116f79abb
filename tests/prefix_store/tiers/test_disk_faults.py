"""Disks that fail: misses and dropped writes are counted, and end with the fault."""

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import FolderUnusable
from prefix_store.tiers.disk.journal import Journal, Record
from tests.prefix_store.tiers.blocks import Memory, chain, format_of
from tests.prefix_store.tiers.full_disk import ANYWHERE, MOUNTED, folder, tmpfs
from tests.prefix_store.tiers.test_contract import kept, restored
from tests.prefix_store.tiers.waiting import until
from tests.waiting import until as eventually

FORMAT = format_of()
CAPACITY = 128 * FORMAT.frame_bytes
BLOCKS = chain("a", 6)


@asynccontextmanager
async def opened(path: Path, capacity: int = CAPACITY) -> AsyncIterator[DiskTier]:
    tier = DiskTier(path, FORMAT, capacity, LeastRecentlyUsed)
    try:
        yield tier
    finally:
        await tier.close()


@pytest.fixture
async def tier(tmp_path: Path) -> AsyncIterator[DiskTier]:
    async with opened(tmp_path / "kv") as tier:
        yield tier


def file_of(tmp_path: Path, number: int) -> Path:
    return next((tmp_path / "kv" / "blocks").glob(f"*/{BLOCKS[number].key.hex()}-*"))


async def test_a_block_that_the_evictor_cannot_be_told_of_is_removed(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would take space that nobody counts, and what follows it would be removed as a block without a parent."""

    def failing(journal: Journal, *records: Record) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Journal, "append", failing)
        assert await kept(tier, BLOCKS) == 0
    assert await tier.lookup(BLOCKS) == 0

    async def are_kept() -> bool:  # after a failure it writes nothing for a second
        return await kept(tier, BLOCKS) == 6

    await eventually(are_kept)
    evictor = tier._maintenance.evictor
    assert evictor is not None
    await until(lambda: len(evictor) == 6, "the evictor knows them")


@pytest.mark.parametrize("fault", [*ANYWHERE, *MOUNTED])
async def test_a_disk_that_takes_no_writes_costs_those_writes(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Stored blocks are read, the fault is logged once, and writes continue after it."""
    caplog.set_level(logging.WARNING, "prefix_store")
    disk = tmp_path / "disk"
    with tmpfs(disk) if fault in MOUNTED else folder(disk):
        async with opened(disk / "kv") as tier:
            assert await kept(tier, BLOCKS) == 6
            late = chain("late", 4)
            with {**ANYWHERE, **MOUNTED}[fault](disk):
                assert await kept(tier, late, 1.0) == 0
                assert await kept(tier, late, 1.1) == 0
                assert await restored(tier, BLOCKS, 1.2) == 6
            assert sum(tier.counts.rejected.values()) == 8
            assert sum(tier.counts.io_errors.values()) >= 1
            said = [record.message for record in caplog.records if "writing KV blocks to" in record.message]
            assert len(said) == 1
            assert not list((disk / "kv" / "writing").iterdir())
            await _kept_in_the_end(tier, "late")
            assert not tier.counts.bad_frames


async def test_a_file_that_was_cut_is_a_miss_and_goes(tier: DiskTier, tmp_path: Path) -> None:
    """For any length: earlier blocks are restored, and the block is written again when offered."""
    await kept(tier, BLOCKS)
    for size in (0, 1, 127, 128, 500, FORMAT.frame_bytes - 1):
        os.truncate(file_of(tmp_path, 2), size)
        assert await restored(tier, BLOCKS) == 2
        assert await kept(tier, BLOCKS) >= 3
    assert sum(tier.counts.bad_frames.values()) == 6


@pytest.mark.parametrize("place", [0, 9, 20, 40, 60, 75, 80, 110, 121, 128, 500, -1])
async def test_a_flipped_bit_is_a_miss(tier: DiskTier, tmp_path: Path, place: int) -> None:
    """In header or numbers: the file is removed and the fault is counted by its field."""
    await kept(tier, BLOCKS)
    file = file_of(tmp_path, 3)
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)
    assert await restored(tier, BLOCKS) == 3
    assert not file.exists()
    assert sum(tier.counts.bad_frames.values()) == 1


async def test_what_follows_a_bad_block_goes_too(tier: DiskTier, tmp_path: Path) -> None:
    """Its descendants are unreachable."""
    await kept(tier, BLOCKS)
    await until(lambda: tier.is_evictor, "the folder has an evictor")
    os.truncate(file_of(tmp_path, 1), 5)
    assert await restored(tier, BLOCKS) == 1
    await until(lambda: len(list((tmp_path / "kv" / "blocks").glob("*/*"))) == 1, "the rest of the chain has gone")


async def test_files_of_others_are_left_alone(tier: DiskTier, tmp_path: Path) -> None:
    """Files with other names stay; a file with a block's name that is no frame is removed when it is read."""
    await kept(tier, BLOCKS)
    file = file_of(tmp_path, 5)
    stranger = file.with_name("holiday.jpg")
    stranger.write_bytes(b"not a block")
    file.write_bytes(b"not a block either" * 1000)
    assert await restored(tier, BLOCKS) == 5
    assert stranger.exists()
    assert not file.exists()


async def test_a_folder_in_the_way_of_a_block_is_a_miss(tier: DiskTier, tmp_path: Path) -> None:
    """The unexpected error is counted and not raised."""
    await kept(tier, BLOCKS)
    file = file_of(tmp_path, 0)
    file.unlink()
    file.mkdir()
    assert await restored(tier, BLOCKS) == 0
    assert tier.counts.io_errors == {"EISDIR": 1}


async def test_a_folder_that_vanishes_and_comes_back_is_the_same(tier: DiskTier, tmp_path: Path) -> None:
    """While the folder is missing there are misses, and it is not created."""
    await kept(tier, BLOCKS)
    identity = tier.identity
    (tmp_path / "kv").rename(tmp_path / "away")
    assert await restored(tier, BLOCKS) == 0
    assert await kept(tier, chain("b", 3)) == 0
    await until(lambda: tier.identity is None, "it is known that the folder is away")
    assert await restored(tier, BLOCKS) == 0
    assert not (tmp_path / "kv").exists()
    (tmp_path / "away").rename(tmp_path / "kv")
    await until(lambda: tier.identity is not None, "the folder is back")
    assert tier.identity == identity
    assert await restored(tier, BLOCKS) == 6
    await _kept_in_the_end(tier, "b")


async def test_an_empty_folder_in_place_of_the_old_one_is_another(tier: DiskTier, tmp_path: Path) -> None:
    """A wiped disk has a new identity, so that the index has no claims of the old blocks."""
    await kept(tier, BLOCKS)
    identity = tier.identity
    shutil.rmtree(tmp_path / "kv")
    (tmp_path / "kv").mkdir()
    await until(lambda: tier.identity not in (None, identity), "the new folder is used")
    assert await restored(tier, BLOCKS) == 0
    await _kept_in_the_end(tier, "a")


async def test_a_disk_that_hangs_costs_the_deadline_of_who_asks(tier: DiskTier, tmp_path: Path) -> None:
    """A hanging read is waited for until the deadline, and writes nothing when it returns."""
    await kept(tier, BLOCKS)
    file = file_of(tmp_path, 0)
    frame = file.read_bytes()
    file.unlink()
    os.mkfifo(file)  # opening it for reading waits for a writer
    memory = Memory(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await tier.read(BLOCKS[:1], memory.all(1), Access(1.0))
    await asyncio.to_thread(file.write_bytes, frame)
    file.unlink()
    file.write_bytes(frame)
    assert await restored(tier, BLOCKS) == 6
    assert memory.is_untouched(0)


async def test_a_file_that_is_being_read_may_be_evicted(tier: DiskTier, tmp_path: Path) -> None:
    """The reader continues."""
    await kept(tier, BLOCKS)
    session = tier._maintenance.session
    assert session is not None
    with file_of(tmp_path, 5).open("rb") as file:
        session.discard(BlockName(BLOCKS[5].key, BLOCKS[5].parent, is_first=False))
        assert len(file.read()) == FORMAT.frame_bytes
    assert await restored(tier, BLOCKS) == 5


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("thesis.tex", "x", "is not a folder of KV blocks: it has 'thesis.tex'; give an empty one"),
        ("identity", "keepgate kv blocks, version 9, x\n", "does not name a folder of KV blocks of version 1"),
    ],
)
async def test_a_folder_of_something_else_is_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    """The start fails with what is expected; the folder is not changed."""
    (tmp_path / name).write_text(content)
    with pytest.raises(FolderUnusable, match=message):
        DiskTier(tmp_path, FORMAT, CAPACITY, LeastRecentlyUsed)
    assert os.listdir(tmp_path) == [name]


async def test_a_capacity_without_room_to_write_ahead_is_refused(tmp_path: Path) -> None:
    """The message has the needed capacity."""
    with pytest.raises(ValueError, match=f"expected at least {64 * FORMAT.frame_bytes:,}: 64 blocks of this model"):
        DiskTier(tmp_path / "kv", FORMAT, 63 * FORMAT.frame_bytes, LeastRecentlyUsed)


async def _kept_in_the_end(tier: DiskTier, name: str) -> None:
    """Writes pause for a second after a failure: retries until they succeed."""
    blocks = chain(name, 4)
    deadline = asyncio.get_running_loop().time() + 20
    while await kept(tier, blocks, 5.0) < 4:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.05)  # waits for the write
    assert await restored(tier, blocks, 6.0) == 4
