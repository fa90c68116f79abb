"""A folder that several processes share: one evicts, all use it, and any may be killed at any time."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.tiers.disk import writer as writer_module
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.folder_session import rename_into
from prefix_store.tiers.disk.journal import RECORD_BYTES, Journal, JournalReader, Kind, Record
from tests.cache.entries.entry_examples import until as eventually
from tests.prefix_store.tiers.blocks import chain, format_of
from tests.prefix_store.tiers.soak import soak
from tests.prefix_store.tiers.test_contract import kept, restored
from tests.prefix_store.tiers.waiting import until

FORMAT = format_of()
CAPACITY = 128 * FORMAT.frame_bytes
Join = Callable[[], DiskTier]


@pytest.fixture(autouse=True)
def patient_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to make room."""
    monkeypatch.setattr(writer_module, "_EVICTOR_TIMEOUT", 30.0)


@pytest.fixture
async def join(tmp_path: Path) -> AsyncIterator[Join]:
    """Another member of the same folder, as another process."""
    members: list[DiskTier] = []

    def join() -> DiskTier:
        members.append(DiskTier(tmp_path / "kv", FORMAT, CAPACITY, LeastRecentlyUsed))
        return members[-1]

    yield join
    for member in members:
        await member.close()


def files_in(tmp_path: Path) -> int:
    return len(list((tmp_path / "kv" / "blocks").glob("*/*")))


def place_in_circle(folder: Folder) -> None:
    for key, parent in ((b"a" * 16, b"b" * 16), (b"b" * 16, b"c" * 16), (b"c" * 16, b"a" * 16)):
        path = Path(folder.block(BlockName(key, parent, is_first=False)))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 100)


async def test_what_one_writes_the_others_read(join: Join) -> None:
    """Others read a block at once, under one identity."""
    writer, reader = join(), join()
    blocks = chain("a", 8)
    assert await kept(writer, blocks) == 8
    assert await restored(reader, blocks) == 8
    assert writer.identity == reader.identity


async def test_one_of_them_evicts_and_another_one_takes_over(join: Join, tmp_path: Path) -> None:
    """The bytes of all together stay within the capacity, for any writer and evictor."""
    first, second = join(), join()
    await until(lambda: first.is_evictor or second.is_evictor, "the folder has an evictor")
    evictor, other = (first, second) if first.is_evictor else (second, first)
    for number in range(20):
        assert await kept(other, chain(f"a {number}", 10), float(number)) == 10
    assert files_in(tmp_path) <= 128
    assert other.counts.evictions == 0 < evictor.counts.evictions
    await evictor.close()
    await until(lambda: other.is_evictor, "the other one has taken over")
    for number in range(20):
        assert await kept(other, chain(f"b {number}", 10), float(number)) == 10
    assert files_in(tmp_path) <= 128
    assert other.counts.evictions > 0
    assert await restored(other, chain("b 19", 10)) == 10


async def test_the_keeper_hears_of_what_others_use(join: Join) -> None:
    """A chain that only another process reads is evicted last."""
    first, second = join(), join()
    await until(lambda: first.is_evictor or second.is_evictor, "the folder has an evictor")
    evictor, other = (first, second) if first.is_evictor else (second, first)
    hot = chain("hot", 10)
    await kept(evictor, hot)
    for number in range(30):
        assert await restored(other, hot, float(number)) == 10
        await kept(evictor, chain(f"cold {number}", 10), float(number))


async def test_a_restart_finds_what_is_there(join: Join, tmp_path: Path) -> None:
    """Blocks are readable at once; those used last are evicted last."""
    before = join()
    hot = chain("hot", 10)
    await kept(before, hot)
    for number in range(8):
        await kept(before, chain(f"{number}", 10), float(number))
    assert await restored(before, hot, 9.0) == 10
    identity = before.identity
    await before.close()
    after = join()
    assert after.identity == identity
    assert await restored(after, chain("5", 10), 10.0) == 10
    for number in range(10):
        await kept(after, chain(f"later {number}", 9), 20.0 + number)
    assert await after.lookup(hot) == 10
    assert await after.lookup(chain("0", 10)) < 10
    assert files_in(tmp_path) <= 128


@pytest.mark.parametrize("place", [0, 4, 9])
async def test_after_a_power_cut_files_may_be_empty(
    join: Join, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int
) -> None:
    """Some disks store names before contents. The state is built nevertheless, and the file removed."""
    before = join()
    blocks = chain("a", 10)
    await kept(before, blocks)
    await before.close()
    empty = next((tmp_path / "kv" / "blocks").glob(f"*/{blocks[place].key.hex()}-*"))
    empty.write_bytes(b"")
    after = join()
    assert await restored(after, blocks) == place
    await until(lambda: not empty.exists(), "the empty file has gone")

    async def is_whole_again() -> bool:
        # The evictor may not have removed the empty file's descendants yet.
        return await kept(after, blocks, 1.0) == 10 == await restored(after, blocks, 2.0)

    await eventually(is_whole_again, within=10.0)
    assert "beginning anew" not in caplog.text


async def test_a_smaller_capacity_takes_effect_at_the_next_start(join: Join, tmp_path: Path) -> None:
    """The chains used last stay, from their first block."""
    before = join()
    for number in range(10):
        await kept(before, chain(f"{number}", 10), float(number))
    await before.close()
    after = DiskTier(tmp_path / "kv", FORMAT, CAPACITY // 2, LeastRecentlyUsed)
    await until(lambda: files_in(tmp_path) <= 56, "the rest has been removed")
    assert await after.lookup(chain("9", 10)) == 10
    assert await after.lookup(chain("0", 10)) == 0
    await after.close()


async def test_what_a_dead_process_had_not_finished_is_removed(join: Join, tmp_path: Path) -> None:
    """Its drafts and its journal are removed; an unreported file is added to the state."""
    folder = Folder.open(tmp_path / "kv")
    dead = Journal(folder.journals)
    (folder.drafts / f"{dead.name}.0").write_bytes(b"half a frame")
    member = join()
    await until(lambda: member.is_evictor, "the folder has an evictor")
    blocks = chain("told", 3)
    await kept(member, blocks)
    dead.close()
    await until(lambda: not list(folder.drafts.iterdir()), "the draft has gone")
    await until(lambda: len(list(folder.journals.iterdir())) == 1, "the journal has gone")
    assert await restored(member, blocks) == 3


async def test_a_damaged_evictor_state_is_rebuilt(join: Join, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is rebuilt from the folder; the folder keeps an evictor."""
    member = join()
    for number in range(9):
        await kept(member, chain(f"{number}", 10), float(number))
    evictor_state = member._maintenance.evictor
    assert evictor_state is not None
    evictor_state._names.clear()
    for number in range(9, 12):  # more than the capacity, and the victims have no name
        await kept(member, chain(f"{number}", 10), float(number))
    await until(lambda: bool(caplog.records), "it is noticed")
    assert "rebuilding the evictor's state" in caplog.text
    await until(lambda: member._maintenance.evictor not in (None, evictor_state), "there are new ones")
    for number in range(12, 18):
        assert await kept(member, chain(f"{number}", 10), float(number)) == 10
    assert files_in(tmp_path) <= 128
    assert await restored(member, chain("17", 10)) == 10


async def test_names_that_go_round_in_a_circle_are_removed(join: Join, tmp_path: Path) -> None:
    """Cycles of parents do not hang the evictor."""
    place_in_circle(Folder.open(tmp_path / "kv"))
    member = join()
    await until(lambda: files_in(tmp_path) == 0, "they have gone")
    assert await kept(member, chain("a", 5)) == 5


async def test_the_end_of_a_request_reaches_the_evictor(join: Join) -> None:
    """The policy gets output lengths from all processes."""
    first, second = join(), join()
    await until(lambda: first.is_evictor or second.is_evictor, "the folder has an evictor")
    evictor, other = (first, second) if first.is_evictor else (second, first)
    access = Access(0.0)
    assert await other.write(chain("a", 2), [[b] for b in _contents(2)], access) == 2
    evictor_state = evictor._maintenance.evictor
    assert evictor_state is not None
    await until(lambda: any(a.output_length is None for a in evictor_state._accesses.values()), "the access is known")
    open_accesses = [a for a in evictor_state._accesses.values() if a.output_length is None]
    access.end(37)
    await until(lambda: any(a.output_length == 37 for a in open_accesses), "its length is known")


def _contents(count: int) -> list[memoryview]:
    return [memoryview(bytes(FORMAT.layout.nbytes)) for _ in range(count)]


def test_a_journal_says_what_was_written_into_it(tmp_path: Path) -> None:
    """Records are read in order, and the writer reads the evictor's progress."""
    journal = Journal(tmp_path)
    reader = JournalReader(tmp_path / journal.name)
    records = [Record(Kind.WROTE, BlockName(bytes([n]) * 16, b"p" * 16, n == 0), 100) for n in range(5)]
    assert not journal.may_write(100)
    reader.write_progress(450)
    journal.append(*records[:4])
    assert journal.may_write(50)
    assert not journal.may_write(51)
    assert reader.read() == records[:4]
    reader.write_progress(450)
    assert journal.may_write(450)
    journal.append(records[4])
    assert reader.read() == records[4:]
    assert not reader.is_abandoned()
    journal.close()
    assert reader.is_abandoned()
    reader.close()


def test_a_damaged_record_is_passed_over_and_noticed(tmp_path: Path) -> None:
    """The folder is scanned then."""
    journal = Journal(tmp_path)
    records = [Record(Kind.USED, BlockName(bytes([n]) * 16, b"p" * 16, False), -1, 1) for n in range(3)]
    journal.append(*records)
    path = tmp_path / journal.name
    data = bytearray(path.read_bytes())
    data[16 + RECORD_BYTES + 20] ^= 1
    path.write_bytes(data)
    reader = JournalReader(path)
    assert reader.read() == [records[0], records[2]]
    assert reader.is_broken
    reader.close()
    journal.close()


def test_a_long_journal_is_begun_anew_when_it_has_been_read(tmp_path: Path) -> None:
    """The old one is left to the evictor."""
    journal = Journal(tmp_path)
    record = Record(Kind.USED, BlockName(bytes(16), bytes(16), True), -1, 1)
    old = journal.name
    journal.append(*[record] * 20_000)
    reader = JournalReader(tmp_path / old)
    reader.write_progress(10)
    journal.may_write(1)
    assert journal.name == old
    assert len(reader.read()) == 20_000
    reader.write_progress(10)
    journal.may_write(1)
    assert journal.name != old
    assert reader.is_abandoned()
    reader.close()
    journal.close()


def test_a_subfolder_may_be_made_by_another_process_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The race between check and creation is harmless."""
    (tmp_path / "draft").write_bytes(b"block")
    target = tmp_path / "cd" / "block"
    rename = os.rename

    def late(draft: str, path: str) -> None:
        if not target.parent.exists():
            target.parent.mkdir()
            raise FileNotFoundError(path)
        rename(draft, path)

    monkeypatch.setattr(os, "rename", late)
    rename_into(str(tmp_path / "draft"), str(target))
    assert target.read_bytes() == b"block"


async def test_nothing_torn_is_ever_seen_while_processes_are_killed(tmp_path: Path) -> None:
    """Four processes write, read and evict; one after the other is killed with SIGKILL."""
    report = await asyncio.wait_for(soak(tmp_path / "kv", 1.0, kills=6), 120)
    assert report.problems == []
    assert report.operations > report.kills >= 6
    assert report.blocks_read > 0


async def test_nobody_else_may_look_into_the_folder(tmp_path: Path) -> None:
    """Blocks can be turned back into prompts, so the folder and its files are readable by the owner only."""
    tier = DiskTier(tmp_path / "kv", format_of(), CAPACITY * format_of().frame_bytes, LeastRecentlyUsed)
    try:
        assert await kept(tier, chain("a", 2)) == 2
        folders = [folder for folder in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")) if folder.is_dir()]
        assert len(folders) >= 5
        assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
        files = [file for file in (tmp_path / "kv" / "blocks").rglob("*") if file.is_file()]
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    finally:
        await tier.close()
