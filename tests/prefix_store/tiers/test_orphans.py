"""Blocks whose parents were removed or are not known yet: they are not found, but use space."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.segments import Bytes
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import Progress, TierCounts
from prefix_store.tiers.disk.block_name import BlockName, block_name
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.evictor import WRITERS, Evictor, bytes_ahead, lock_evictor
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.folder_session import FolderSession, Use
from prefix_store.tiers.disk.writer import DiskWriter
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
        save(self.other, BlockName(block.key, block.parent, is_first))

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


class Turns:
    """A folder whose evictor takes a turn when it is told to."""

    def __init__(self, path: Path) -> None:
        self.folder = Folder.open(path)
        lock = lock_evictor(self.folder)
        assert lock is not None
        self.evictor = Evictor(self.folder, lock, CAPACITY, LeastRecentlyUsed(), lambda keys: None)
        self.sessions: list[FolderSession] = []

    def session(self) -> FolderSession:
        """One more process, whose journal is read after those of the others."""
        self.sessions.append(FolderSession(self.folder))
        self.evictor.turn()
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.close()
        self.evictor.close()


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    made = Turns(tmp_path / "kv")
    yield made
    made.close()


def save(session: FolderSession, name: BlockName) -> None:
    session.save(name, np.zeros(FORMAT.frame_bytes, np.uint8))


def test_a_child_whose_parent_is_heard_of_later_stays(turns: Turns) -> None:
    """The parent's journal is read later; an earlier removal of the parent makes no difference."""
    parent, child = (block_name(FORMAT, chain("0", 2), place) for place in range(2))
    first, later = turns.session(), turns.session()
    save(first, parent)
    turns.evictor.turn()
    first.discard(parent)
    turns.evictor.turn()
    save(later, parent)
    save(first, child)
    turns.evictor.turn()
    assert (first.has(parent), first.has(child)) == (True, True)
    assert {parent.key, child.key} <= set(turns.evictor._names)


def test_a_child_of_an_evicted_block_takes_no_room_from_its_writer(turns: Turns) -> None:
    """A policy that evicts a chain while it is written does not make its writer wait."""
    session, names = turns.session(), [block_name(FORMAT, chain("0", 4), place) for place in range(4)]
    save(session, names[0])
    save(session, names[1])
    turns.evictor.turn()
    session.discard(names[1])
    turns.evictor.turn()
    room = bytes_ahead(CAPACITY)
    assert session.may_write(room)
    save(session, names[2])
    save(session, names[3])
    assert not session.may_write(room)
    turns.evictor.turn()
    assert session.may_write(room)
    assert [session.has(name) for name in names] == [True, False, False, False]


def fill(turns: Turns, session: FolderSession) -> list[BlockName]:
    """Ten chains of twelve blocks, of which not all fit; returns their names."""
    names = [block_name(FORMAT, chain(f"{number}", 12), place) for number in range(10) for place in range(12)]
    for name in names:
        save(session, name)
        turns.evictor.turn()
    return names


def test_what_is_written_while_a_full_folder_is_scanned_stays(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is newer than what is known, which makes way; its writer goes on with the chain."""
    session, ending = turns.session(), turns.session()
    old = fill(turns, session)
    new = [block_name(FORMAT, chain("new", 4), place) for place in range(4)]
    scan = turns.evictor._scan

    def scan_late() -> None:
        for name in new[:2]:
            save(session, name)
        scan()

    with monkeypatch.context() as patched:
        patched.setattr(turns.evictor, "_scan", scan_late)
        ending.close()
        turns.evictor._next_liveness = 0.0
        turns.evictor.turn()
    assert all(map(session.has, new[:2]))
    turns.evictor.turn()
    for name in new[2:]:
        save(session, name)
        turns.evictor.turn()
    assert all(map(session.has, new))
    assert not turns.evictor.problems()
    assert {name.key for name in [*old, *new] if session.has(name)} == set(turns.evictor._names)
    assert turns.evictor.used_bytes <= CAPACITY - WRITERS * bytes_ahead(CAPACITY)


def place(turns: Turns, names: list[BlockName], sizes: dict[BlockName, int]) -> None:
    """Puts files into the folder that no journal names, each used later than the one before; most are of one frame."""
    for number, name in enumerate(names):
        path = Path(turns.folder.block(name))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(sizes.get(name, FORMAT.frame_bytes)))
        os.utime(path, (4e9 + number, 4e9 + number))
    turns.evictor._next_scan = 0.0
    turns.evictor.turn()


def test_many_files_that_a_scan_finds_do_not_cost_the_newest_one_its_parent(turns: Turns) -> None:
    """It goes on with a chain that was used before all of them."""
    session = turns.session()
    old = [name for name in fill(turns, session) if session.has(name)]
    found = [block_name(FORMAT, chain(f"found {number}", 12), at) for number in range(8) for at in range(12)]
    parent = old[3]  # the end of what is left of the first chain, which would be evicted first
    found.append(BlockName(b"c" * 16, parent.key, is_first=False))
    place(turns, found, {})
    stored = {block.name for block in turns.folder.stored()}
    assert not turns.evictor.problems()
    assert {name.key for name in stored} == set(turns.evictor._names)
    assert {*found, parent} <= stored
    assert old[4] not in stored


def test_files_of_other_sizes_that_a_scan_finds_count_with_these(turns: Turns) -> None:
    """A chain may end with an empty file, as after a power cut."""
    fill(turns, turns.session())
    found = [block_name(FORMAT, chain("found", 100), at) for at in range(100)]
    place(turns, found, {found[-1]: 0})
    assert not turns.evictor.problems()
    assert sum(block.size for block in turns.folder.stored()) == turns.evictor.used_bytes <= CAPACITY


def test_a_first_block_follows_no_other_whatever_its_name_says(turns: Turns) -> None:
    """Its parent is not looked for in the folder."""
    other, first = block_name(FORMAT, chain("other", 1), 0), BlockName(b"f" * 16, chain("other", 1)[0].key, True)
    place(turns, [first, other], {})
    assert not turns.evictor.problems()
    assert set(turns.evictor._names) == {other.key, first.key}


def test_a_block_whose_file_is_gone_when_its_record_is_read_is_not_known(turns: Turns) -> None:
    """A scan may have found and evicted it before."""
    session, name = turns.session(), block_name(FORMAT, chain("0", 1), 0)
    save(session, name)
    os.unlink(turns.folder.block(name))
    turns.evictor.turn()
    assert len(turns.evictor) == 0


def test_of_a_frame_that_was_freed_while_it_was_written_no_file_is_left(
    turns: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may have held another block by then."""
    session, name, cancel = turns.session(), block_name(FORMAT, chain("0", 1), 0), CancelToken()
    write = os.write

    def freed_then(file: int, data: memoryview) -> int:
        written = write(file, data)
        if len(data) == FORMAT.frame_bytes:
            cancel.set()
        return written

    monkeypatch.setattr(os, "write", freed_then)
    with pytest.raises(Cancelled):
        session.save(name, np.zeros(FORMAT.frame_bytes, np.uint8), cancel)
    assert not session.has(name)
    assert not [path for path in turns.folder.path.rglob("*") if path.stat().st_size == FORMAT.frame_bytes]


class Evicting(FolderSession):
    """What is written is evicted at once."""

    def save(self, name: BlockName, frame: Bytes, cancel: CancelToken | None = None) -> None:
        super().save(name, frame, cancel)
        self.discard(name)


def test_the_rest_of_a_chain_that_is_evicted_meanwhile_is_not_written(turns: Turns) -> None:
    """It would be of no use."""
    session, blocks, progress = Evicting(turns.folder), chain("0", 3), Progress()
    turns.sessions.append(session)
    turns.evictor.turn()
    writer = DiskWriter(turns.folder.path, FORMAT, TierCounts(), lambda seconds: True)
    sources = [[np.zeros(FORMAT.layout.nbytes, np.uint8)] for _ in blocks]
    reason = writer.store(session, blocks, sources, Use(1, None), progress, CancelToken())
    assert (progress.done, reason) == (1, "what comes before it is not here")
