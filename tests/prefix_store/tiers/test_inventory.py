"""A tier's inventory, for the index."""

import asyncio
import functools
import os
import time
from pathlib import Path

import pytest

from prefix_store.codecs.registry import CODECS
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.tiers.disk import maintenance
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.inventory import Inventory, Scan, ScanResult
from tests.prefix_store.tiers.blocks import CAPACITY, Make, chain, format_of
from tests.prefix_store.tiers.test_contract import kept
from tests.prefix_store.tiers.waiting import until

FORMAT = format_of()


def disk(path: Path, frames: int = CAPACITY) -> DiskTier:
    return DiskTier(path, FORMAT, frames * FORMAT.frame_bytes, LeastRecentlyUsed)


async def test_what_can_be_read_is_in_it(own: Make) -> None:
    """It has the stored keys, parents before children, and no removed blocks."""
    gone: list[bytes] = []
    tier = await own(CODECS["int8"], gone.extend)
    root = chain("root", 4)
    chains = [chain(f"{number}", 12, root=root) for number in range(9)]
    await asyncio.gather(*(kept(tier, blocks, float(number)) for number, blocks in enumerate(chains)))
    key = tier.format.stored_key
    room = CAPACITY * 7 // 8 if isinstance(tier, DiskTier) else CAPACITY
    await until(lambda: (tier.blocks or 0) <= room, "what had to go has gone")
    held = tier.inventory()
    assert tier.blocks is not None
    place = {stored: number for number, stored in enumerate(held)}
    assert len(place) == len(held) == tier.blocks
    assert tier.used_bytes == tier.blocks * tier.format.frame_bytes
    assert tier.blocks < 4 + 9 * 8
    assert place.keys().isdisjoint(gone)
    for blocks in chains:
        there = [key(block.key) for block in blocks[: await tier.lookup(blocks)]]
        assert set(there) <= place.keys()
        assert [place[stored] for stored in there] == sorted(place[stored] for stored in there)
        assert place.keys().isdisjoint(key(block.key) for block in blocks[len(there) :])


async def test_a_restart_of_a_disk_finds_what_was_there(tmp_path: Path) -> None:
    """Old blocks are in it after the first listing, for any order of files."""
    before = disk(tmp_path / "kv")
    chains = [chain(f"{number}", 12) for number in range(4)]
    for blocks in chains:
        await kept(before, blocks)
    await before.close()
    after, second = disk(tmp_path / "kv"), disk(tmp_path / "kv")
    for tier in (after, second):
        await asyncio.wait_for(tier.listed(), 10)
        place = {key: number for number, key in enumerate(tier.inventory())}
        assert len(place) == 4 * 12 == tier.blocks
        for blocks in chains:
            places = [place[block.key] for block in blocks]
            assert places == sorted(places)
    await after.close()
    await second.close()


async def test_what_other_processes_do_is_found_a_while_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another process is the evictor."""
    monkeypatch.setattr(maintenance, "LIST_SECONDS", 0.05)
    tiers = [disk(tmp_path / "kv"), disk(tmp_path / "kv")]
    blocks = [chain("a", 6), chain("b", 6)]
    for tier, written in zip(tiers, blocks, strict=True):
        await kept(tier, written)
    for tier in tiers:
        await until(functools.partial(_has, tier, 12), "what the other wrote is known")
    for number in range(6):
        await kept(tiers[0], chain(f"later {number}", 10), 9.0)
    for tier in tiers:
        await until(functools.partial(_is_right, tier, tmp_path / "kv"), "what has gone is known")
        await tier.close()


def _has(tier: DiskTier, blocks: int) -> bool:
    return tier.blocks == blocks


def _is_right(tier: DiskTier, path: Path) -> bool:
    return tier.blocks == sum(len(files) for _, _, files in os.walk(path / "blocks"))


async def test_a_folder_that_is_away_holds_nothing(tmp_path: Path) -> None:
    """It is listed again when it is back."""
    tier = disk(tmp_path / "kv")
    await kept(tier, chain("a", 6))
    (tmp_path / "kv").rename(tmp_path / "away")
    await until(lambda: tier.blocks == 0, "the folder is missed")
    assert tier.inventory() == ()
    (tmp_path / "away").rename(tmp_path / "kv")
    await until(lambda: tier.blocks == 6, "it is found again")
    await tier.close()


def listed(folder: Folder) -> list[bytes]:
    last = list(Scan(folder, 100).look())[-1]
    assert last is not None
    return list(last.keys)


def put(folder: Folder, key: str, parent: str, is_first: bool = False, size: int = 100) -> bytes:
    name = BlockName(key.encode() * 16, parent.encode() * 16, is_first)
    path = Path(folder.block(name))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    return name.key


def test_only_what_can_be_reached_is_listed(tmp_path: Path) -> None:
    """Orphans, frames of another format and cycles are not listed."""
    folder = Folder.open(tmp_path / "kv")
    third = put(folder, "c", "b")
    second = put(folder, "b", "a")
    first = put(folder, "a", "0", is_first=True)
    put(folder, "e", "d")
    put(folder, "f", "g")
    put(folder, "g", "f")
    put(folder, "h", "0", is_first=True, size=50)
    put(folder, "i", "h")
    assert listed(folder) == [first, second, third]


def test_a_look_reads_only_what_has_changed(tmp_path: Path) -> None:
    """A recently changed subfolder is read again: clocks of file systems are coarse."""
    folder = Folder.open(tmp_path / "kv")
    listing = Scan(folder, 100)
    first = put(folder, "a", "0", is_first=True)
    old = time.time() - 100
    part = Path(folder.block(BlockName(first, b"", True))).parent

    def look() -> list[bytes]:
        last = list(listing.look())[-1]
        assert last is not None
        return list(last.keys)

    assert look() == [first]
    unnoticed = put(folder, "a", "1", is_first=True)
    assert unnoticed == first
    os.utime(part, (old, old))
    assert look() == [first]
    (part / next(part.iterdir()).name).unlink()
    (part / next(part.iterdir()).name).unlink()
    os.utime(part, (old, old))
    assert look() == [first]
    part.touch()
    assert look() == []


async def test_what_is_done_during_a_look_is_not_lost_by_it() -> None:
    """Changes during a listing are kept."""
    inventory = Inventory()
    inventory.add([b"old", b"early"])
    began = time.monotonic()
    inventory.add([b"a", b"b"])
    inventory.remove([b"early", b"b"])
    inventory.take(ScanResult(began, dict.fromkeys([b"old", b"early", b"b"])))
    assert inventory.is_listed.is_set()
    assert inventory.keys() == (b"old", b"a")
    inventory.take(ScanResult(time.monotonic(), dict.fromkeys([b"a"])))
    assert inventory.keys() == (b"a",)
