"""Files of evicted blocks are written over, and nobody takes them for what they were."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.counts import Progress, TierCounts
from prefix_store.tiers.disk.block_name import block_name
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.folder_session import FolderSession, Use
from prefix_store.tiers.disk.reader import DiskReader
from prefix_store.tiers.disk.spares import Spares
from tests.prefix_store.tiers.blocks import Memory, chain, content, format_of
from tests.prefix_store.tiers.test_contract import kept, restored
from tests.prefix_store.tiers.waiting import until

FORMAT = format_of()
SIZE = FORMAT.frame_bytes
CAPACITY = 128 * SIZE
NAMES = [block_name(FORMAT, blocks := chain("a", 4), place) for place in range(4)]


def frame(number: int) -> np.ndarray:
    return np.full(SIZE, number, np.uint8)


@pytest.fixture
def session(tmp_path: Path) -> FolderSession:
    return FolderSession(Folder.open(tmp_path / "kv"))


def test_a_block_is_written_into_the_file_of_an_evicted_one(session: FolderSession) -> None:
    """The same file, all of its bytes new; a second block gets a file of its own."""
    spares = Spares(session.folder)
    session.save(NAMES[0], frame(1))
    first = os.open(session.folder.block(NAMES[0]), os.O_RDONLY)  # so that its number is not given to another file
    spares.limit(SIZE)
    spares.keep(NAMES[0])
    assert not session.has(NAMES[0])
    session.save(NAMES[1], frame(2))
    session.save(NAMES[2], frame(3))
    files = [Path(session.folder.block(name)) for name in NAMES[1:3]]
    assert files[0].stat().st_ino == os.fstat(first).st_ino != files[1].stat().st_ino
    os.close(first)
    assert [file.read_bytes() for file in files] == [bytes([2]) * SIZE, bytes([3]) * SIZE]
    assert not list(session.folder.spares.iterdir())


def test_no_more_is_kept_than_there_is_room_for(session: FolderSession) -> None:
    """What is beyond is removed, also when the room gets smaller; a block that is gone is none."""
    spares = Spares(session.folder)
    for place in range(3):
        session.save(NAMES[place], frame(place))
    spares.limit(2 * SIZE)
    for name in NAMES:
        spares.keep(name)
    assert len(list(session.folder.spares.iterdir())) == 2
    assert not any(session.has(name) for name in NAMES)
    spares.limit(SIZE + 1)
    assert len(list(session.folder.spares.iterdir())) == 1
    spares.limit(0)
    assert not list(session.folder.spares.iterdir())


def test_no_more_files_are_kept_than_are_listed_quickly(session: FolderSession) -> None:
    """However much room there is."""
    spares, names = Spares(session.folder), [block_name(FORMAT, chain("b", 70), place) for place in range(70)]
    spares.limit(2**30)
    for name in names:
        session.save(name, frame(1))
    for name in names:
        spares.keep(name)
    assert len(list(session.folder.spares.iterdir())) == 64
    assert not any(session.has(name) for name in names)


def test_files_of_other_sizes_and_strange_ones_are_left_alone(session: FolderSession) -> None:
    """A block has the bytes that it was written with, and no more."""
    for file, size in ((f"{SIZE + 1}.other", SIZE + 1), ("notes", 3), (".5", 5)):
        (session.folder.spares / file).write_bytes(bytes(size))
    session.save(NAMES[0], frame(1))
    assert Path(session.folder.block(NAMES[0])).read_bytes() == bytes([1]) * SIZE
    assert len(list(session.folder.spares.iterdir())) == 3


def test_a_folder_without_the_place_for_spare_files_is_written_to(session: FolderSession) -> None:
    """Somebody may have removed it."""
    session.folder.spares.rmdir()
    spares = Spares(session.folder)
    session.save(NAMES[0], frame(1))
    spares.limit(SIZE)
    spares.keep(NAMES[0])
    assert not session.has(NAMES[0])
    session.save(NAMES[1], frame(2))
    assert session.has(NAMES[1])


def test_clearing_removes_them(session: FolderSession) -> None:
    """They have numbers of prompts."""
    spares = Spares(session.folder)
    spares.limit(SIZE)
    session.save(NAMES[0], frame(1))
    spares.keep(NAMES[0])
    session.clear()
    assert not list(session.folder.spares.iterdir())


def test_what_is_written_over_while_it_is_read_is_a_miss(
    session: FolderSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not damage: nothing is counted or logged as such, and nothing wrong is restored."""
    counts, memory, blocks = TierCounts(), Memory(1), chain("a", 4)
    spares, reader = Spares(session.folder), DiskReader(tmp_path, FORMAT, counts)
    sealed = frame(0)
    FORMAT.seal(blocks[0], [content(blocks[0])], sealed)
    session.save(NAMES[0], sealed)
    readv = os.readv

    def evicted_meanwhile(file: int, into: list[memoryview]) -> int:
        monkeypatch.setattr(os, "readv", readv)
        spares.limit(SIZE)
        spares.keep(NAMES[0])
        session.save(NAMES[1], frame(7))
        return readv(file, into)

    monkeypatch.setattr(os, "readv", evicted_meanwhile)
    progress = Progress()
    reader.restore(session, blocks[:1], memory.all(1), Use(1, None), progress, CancelToken())
    assert (progress.done, counts.bad_frames.total()) == (0, 0)
    assert memory.is_untouched(0)
    assert session.has(NAMES[1])


async def test_a_full_tier_writes_into_what_it_evicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files, spare ones with them, never exceed the capacity, and every block is what was stored."""
    tier = DiskTier(tmp_path / "kv", FORMAT, CAPACITY, LeastRecentlyUsed)
    await until(lambda: tier.is_evictor, "the folder has an evictor")
    taken: list[bool] = []
    take = Spares.take

    def noted(spares: Spares, size: int, draft: str) -> bool:
        taken.append(take(spares, size, draft))
        return taken[-1]

    monkeypatch.setattr(Spares, "take", noted)
    for number in range(60):
        await kept(tier, chain(f"{number}", 10), float(number))
        folders = [tmp_path / "kv" / name for name in ("blocks", "writing", "spare")]
        # By number: a file may move while the folders are listed.
        found = dict(each for folder in folders for file in folder.rglob("*-*") for each in _sizes(file))
        assert sum(found.values()) <= CAPACITY
    assert await restored(tier, chain("59", 10)) == 10
    assert sum(taken) > 200  # of 600 blocks
    await tier.close()


def _sizes(file: Path) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
        yield (found := file.stat()).st_ino, found.st_size
