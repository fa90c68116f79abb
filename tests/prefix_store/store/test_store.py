"""A store over host memory and disk: stored blocks are restored, from the right place, in time."""

import asyncio
import functools
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefix_store.codecs.plain import Plain
from prefix_store.codecs.registry import PLAIN
from prefix_store.codecs.scaled import FP8, INT8
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.layout import BlockLayout
from prefix_store.store.config import StoreConfig
from prefix_store.store.location import Location
from prefix_store.store.open_store import open_store
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.disk.folder_session import FolderSession
from tests.prefix_store.store.world import ROOM, engine, file_of
from tests.prefix_store.tiers.blocks import LAYOUT, NAMESPACE, Memory, chain
from tests.prefix_store.tiers.waiting import until

CHAIN = chain("a prompt", 10)


@contextmanager
def hanging(folder: Path, blocks: Sequence[BlockId], place: int) -> Iterator[None]:
    """A disk on which opening the file of one block hangs."""
    path = file_of(folder, blocks, place)
    path.unlink()
    os.mkfifo(path)  # opening it for reading waits for a writer
    try:
        yield
    finally:
        released = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(released)


def holds(memory: Memory, blocks: Sequence[BlockId], count: int) -> bool:
    return all(memory.holds(place, blocks[place]) for place in range(count))


async def test_what_is_kept_is_in_every_tier_and_comes_back_from_the_fastest(tmp_path: Path) -> None:
    """Every bit is restored, and the figures count it."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        location = await one.leading(CHAIN, memory=10, disk=10)
        assert location == Location({"memory": 10, "disk": 10})
        assert (location.blocks, location.kept) == (10, 10)
        memory = Memory(12)
        restored = await one.restore(CHAIN, location, memory)
        assert (restored.blocks, restored.lossy_from) == (10, None)
        assert holds(memory, CHAIN, 10)
        assert one.store.figures.restored == {"memory": 10}
        assert one.store.figures.kept == {"memory": 10, "disk": 10}
        assert one.store.figures.offered == 10


async def test_nothing_is_found_of_an_empty_chain(tmp_path: Path) -> None:
    """Also a store without places finds nothing."""
    async with engine(memory_bytes=ROOM) as one:
        assert await one.store.locate([]) == Location({"memory": 0})
    async with engine() as nothing:
        location = await nothing.store.locate(CHAIN)
        assert (location.blocks, location.kept) == (0, 0)
        assert (await nothing.restore(CHAIN, location, Memory(10))).blocks == 0
        await nothing.keep(CHAIN)


async def test_only_the_last_blocks_of_a_chain_are_restored(tmp_path: Path) -> None:
    """The earlier blocks are in the engine's memory already."""
    async with engine(disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        memory = Memory(4)
        location = await one.leading(CHAIN, disk=10)
        restored = await one.store.restore(CHAIN, memory.all(4), location, None, access=_access(), cancel=CancelToken())
        assert restored.blocks == 4
        assert all(memory.holds(place, CHAIN[6 + place]) for place in range(4))


async def test_a_restart_finds_on_disk_what_was_in_memory(tmp_path: Path) -> None:
    """Host memory ends with the process."""
    start = functools.partial(engine, memory_bytes=ROOM, disk=tmp_path / "kv")
    async with start() as before:
        await before.keep(CHAIN)
    async with start() as after:
        location = await after.leading(CHAIN, memory=0, disk=10)
        memory = Memory(10)
        assert (await after.restore(CHAIN, location, memory)).blocks == 10
        assert holds(memory, CHAIN, 10)


async def test_where_a_place_has_less_than_it_said_the_next_one_goes_on(tmp_path: Path) -> None:
    """Memory evicts half of the chain between look-up and read."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        location = await one.leading(CHAIN, memory=10, disk=10)
        await one.store.tiers["memory"].discard(CHAIN, 5)
        memory = Memory(10)
        assert (await one.restore(CHAIN, location, memory)).blocks == 10
        assert holds(memory, CHAIN, 10)
        assert one.store.figures.restored == {"memory": 5, "disk": 5}


async def test_what_nobody_has_any_more_is_computed(tmp_path: Path) -> None:
    """The restore ends before the first missing block."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        location = await one.leading(CHAIN, memory=10, disk=10)
        await one.store.tiers["memory"].discard(CHAIN, 3)
        await one.store.tiers["disk"].discard(CHAIN, 7)
        memory = Memory(10)
        assert (await one.restore(CHAIN, location, memory)).blocks == 7
        assert holds(memory, CHAIN, 7)


async def test_a_damaged_file_ends_the_restore_before_its_block(tmp_path: Path) -> None:
    """The damaged block is a miss, and later ones are not fetched."""
    async with engine(disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        path = file_of(tmp_path / "kv", CHAIN, 6)
        frame = bytearray(path.read_bytes())
        frame[-1] ^= 1
        path.write_bytes(frame)
        memory = Memory(10)
        assert (await one.restore(CHAIN, Location({"disk": 10}), memory)).blocks == 6
        assert holds(memory, CHAIN, 6)


async def test_a_hanging_place_ends_at_the_deadline_and_what_it_gave_counts(tmp_path: Path) -> None:
    """The blocks before the one that hangs count, of this place and of earlier ones."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        await one.store.tiers["memory"].discard(CHAIN, 4)
        location = await one.leading(CHAIN, memory=4, disk=10)
        with hanging(tmp_path / "kv", CHAIN, 6):
            memory = Memory(10)
            began = time.monotonic()
            restored = await one.restore(CHAIN, location, memory, block_seconds=0.02)
            seconds = time.monotonic() - began
            assert restored.blocks == 6
            assert holds(memory, CHAIN, 6)
            assert 0.35 < seconds < 2.0  # twice as long as it takes to compute them
            assert one.store.figures.late == 1
            estimate = one.store.times["disk"].estimate(1)
            assert estimate is not None
            assert estimate > 0.02  # so it is not used again soon
        await asyncio.sleep(0)
        assert memory.is_untouched(6)


async def test_a_restore_that_takes_long_does_not_hide_the_disk_from_others(tmp_path: Path) -> None:
    """Look-ups of other requests are answered meanwhile."""
    async with engine(disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        location = await one.leading(CHAIN, disk=10)
        with hanging(tmp_path / "kv", CHAIN, 6):
            memory, cancel = Memory(10), CancelToken()
            restoring = asyncio.create_task(one.restore(CHAIN, location, memory, cancel=cancel))
            await until(lambda: memory.holds(5, CHAIN[5]), "it has come to the file that hangs")
            await one.finds(CHAIN, 10)
            cancel.set()
            assert (await restoring).blocks == 6


async def test_nobody_waits_long_to_tell_a_disk_that_hangs_of_a_use(tmp_path: Path) -> None:
    """`touch` ends after its timeout, and leaves no tasks."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        location = await one.leading(CHAIN, memory=10, disk=10)
        with hanging(tmp_path / "kv", CHAIN, 6):
            await one.store.tiers["memory"].discard(CHAIN, 4)
            cancel = CancelToken()
            restoring = asyncio.create_task(one.restore(CHAIN, location, memory := Memory(10), cancel=cancel))
            await until(lambda: memory.holds(5, CHAIN[5]), "it has come to the file that hangs")
            async with asyncio.timeout(5):
                await one.store.touch(CHAIN, location, _access())
            cancel.set()
            await restoring


async def test_a_disk_on_which_writing_hangs_does_not_keep_the_engine_s_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources are free after a timeout; until the disk is tried again, it is skipped."""
    hung = threading.Event()
    monkeypatch.setattr(FolderSession, "save", lambda *block: hung.wait(20))
    monkeypatch.setattr("prefix_store.store.store._LONGEST_KEEP", 1.0)
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        for name in ("first", "second"):
            began = time.monotonic()
            await one.keep(chain(name, 5))
            await one.leading(chain(name, 5), memory=5, disk=0)
        assert time.monotonic() - began < 0.9  # the second time
        hung.set()


async def test_a_block_is_encoded_once_for_all_tiers_of_one_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk writes the frames that memory has, also if memory evicts them meanwhile."""
    encoded: list[str] = []
    encode, save = Plain.encode, FolderSession.save
    writes, may_write = threading.Event(), threading.Event()

    def counted(codec: Plain, *args: Any) -> None:
        encoded.append(threading.current_thread().name)
        encode(codec, *args)

    def held_up(session: FolderSession, *block: Any) -> None:
        writes.set()
        assert may_write.wait(20)
        save(session, *block)

    monkeypatch.setattr(Plain, "encode", counted)
    monkeypatch.setattr(FolderSession, "save", held_up)
    async with engine(memory_bytes=ROOM // 250, disk=tmp_path / "kv") as one:
        memory = one.store.tiers["memory"]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.keep(CHAIN))
            await asyncio.to_thread(writes.wait, 20)
            assert set(encoded) == {"kv-host-write-0"}
            assert len(encoded) == 10
            for name in map(str, range(8)):
                others = chain(name, 10)
                await memory.write(others, Memory(10).fill(others), _access())
            assert await memory.lookup(CHAIN) == 0
            may_write.set()
        await one.restore(CHAIN, await one.leading(CHAIN, memory=0, disk=10), restored := Memory(10))
        assert holds(restored, CHAIN, 10)
        assert "kv-disk-write-0" not in encoded


async def test_memory_and_disk_of_other_formats_each_encode_the_block(tmp_path: Path) -> None:
    """What memory has is of no use to the disk then, whichever of the two loses bits."""
    for in_memory, on_disk, exact in ((INT8, PLAIN, "disk"), (PLAIN, INT8, "memory")):
        folder = tmp_path / exact
        async with engine(memory_bytes=ROOM, memory_codec=in_memory, disk=folder, disk_codec=on_disk) as one:
            await one.keep(CHAIN)
            await one.leading(CHAIN, memory=10, disk=10)
            for place in ("memory", "disk"):
                restored = await one.restore(CHAIN, Location({place: 10}), memory := Memory(10))
                assert restored.blocks == 10
                assert holds(memory, CHAIN, 10) == (place == exact)


async def test_a_halt_from_another_thread_ends_a_restore_at_once(tmp_path: Path) -> None:
    """Blocks restored by then count, no memory is touched afterwards, and no other place is used."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        await one.store.tiers["memory"].discard(CHAIN, 4)
        location = await one.leading(CHAIN, memory=4, disk=10)
        with hanging(tmp_path / "kv", CHAIN, 6):
            memory, cancel = Memory(10), CancelToken()
            restoring = asyncio.create_task(one.restore(CHAIN, location, memory, cancel=cancel))
            await until(lambda: memory.holds(5, CHAIN[5]), "all before the file that hangs is there")
            began = time.monotonic()
            thread = threading.Thread(target=cancel.set)
            thread.start()
            restored = await restoring
            assert time.monotonic() - began < 2.0
            thread.join()
            assert restored.blocks == 6
            was = memory.bytes.copy()
        await one.restore(CHAIN, await one.leading(CHAIN, memory=4, disk=6), Memory(10))
        assert np.array_equal(memory.bytes, was)
        assert one.store.figures.late == 0


async def test_a_halt_that_is_set_already_restores_and_keeps_nothing(tmp_path: Path) -> None:
    """No place is used."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        cancel = CancelToken()
        cancel.set()
        assert (
            await one.restore(CHAIN, await one.leading(CHAIN, memory=10, disk=10), Memory(10), cancel=cancel)
        ).blocks == 0
        assert one.store.tiers["disk"].counts.misses == 0
        other = chain("another", 5)
        await one.store.keep(other, Memory(5).fill(other), _access(), True, cancel)
        await one.leading(other, memory=0, disk=0)


async def test_the_first_block_that_came_back_with_a_loss_is_named(tmp_path: Path) -> None:
    """Memory has the first blocks exact, the disk has int8."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv", disk_codec=INT8) as one:
        await one.keep(CHAIN)
        await one.store.tiers["memory"].discard(CHAIN, 4)
        memory = Memory(10)
        restored = await one.restore(CHAIN, await one.leading(CHAIN, memory=4, disk=10), memory)
        assert (restored.blocks, restored.lossy_from) == (10, 4)
        assert holds(memory, CHAIN, 4)
        assert not memory.is_untouched(9)
        assert (
            await one.restore(CHAIN[:4], await one.leading(CHAIN[:4], memory=4, disk=4), Memory(4))
        ).lossy_from is None


async def test_what_is_not_exact_is_kept_only_where_nothing_is(tmp_path: Path) -> None:
    """Blocks computed after lossy ones are not stored under exact keys."""
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv", disk_codec=INT8) as one:
        await one.keep(CHAIN, exact=False)
        await one.leading(CHAIN, memory=0, disk=10)
    async with engine(memory_bytes=ROOM, disk=tmp_path / "exact") as exact:
        await exact.keep(CHAIN, exact=False)
        await exact.leading(CHAIN, memory=0, disk=0)


async def test_what_is_pinned_discarded_or_cleared_is_so_in_every_tier(tmp_path: Path) -> None:
    """A discard also removes descendants, pinned or not."""
    longer = chain("a longer prompt", 15, root=CHAIN)
    async with engine(memory_bytes=ROOM, disk=tmp_path / "kv") as one:
        await one.keep(longer)
        other = chain("another", 5)
        await one.keep(other)
        assert await one.store.pin(CHAIN) == {"memory": 10, "disk": 10}
        assert await one.store.unpin(longer) == {"memory": 10, "disk": 10}
        assert await one.store.unpin(longer) == {"memory": 0, "disk": 0}
        await one.store.pin(CHAIN)
        await one.store.discard(CHAIN)
        await one.leading(longer, memory=0, disk=0)
        await one.leading(other, memory=5, disk=5)
        assert await one.store.clear() == 10
        await one.leading(other, memory=0, disk=0)


async def test_a_slow_place_is_computed_and_the_figures_say_so(tmp_path: Path) -> None:
    """A disk that is slower than the engine is not read."""
    async with engine(disk=tmp_path / "kv") as one:
        await one.keep(CHAIN)
        one.store.times["disk"].note_late(10, 10.0, time.monotonic())
        assert (
            await one.restore(CHAIN, await one.leading(CHAIN, disk=10), Memory(10), block_seconds=0.001)
        ).blocks == 0
        assert one.store.figures.computed == {"disk": 10}
        assert one.store.figures.fetched == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory_bytes": 100}, "memory_bytes: 100 bytes, expected at least 896: one block of this model"),
        ({"memory_bytes": -1}, "memory_bytes is -1, expected at least 0"),
        ({"disk_bytes": 100}, "disk_bytes: 100 bytes, expected at least 57,344: 64 blocks of this model"),
        ({"disk_bytes": -1}, "disk_bytes is -1, expected at least 0"),
        ({"audit_every": -1}, "audit_every is -1, expected at least 0"),
        ({"index": "localhost:6379", "name": "a"}, "index: Redis URL must specify one of the following schemes"),
        ({"index": "redis://localhost"}, "name is empty, expected one of this engine's own in the index"),
        ({"address": "localhost:80"}, "address is 'localhost:80', expected http://host:port or https://host:port"),
        ({"address": "http://host:port"}, "address is 'http://host:port', expected http://host:port"),
    ],
)
async def test_what_cannot_be_opened_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    """The message begins with the field of the configuration."""
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        async with open_store(StoreConfig(**{"disk": tmp_path / "kv"} | fields), NAMESPACE, LAYOUT):
            raise AssertionError("it was opened")


@pytest.mark.parametrize("field", ["memory_codec", "disk_codec"])
async def test_a_codec_that_cannot_write_the_blocks_is_named(tmp_path: Path, field: str) -> None:
    """A lossy codec needs the axes of a block's layout."""
    config = StoreConfig(memory_bytes=ROOM, disk=tmp_path / "kv", **{field: INT8})  # type: ignore[arg-type]  # by name
    with pytest.raises(ValueError, match=f"^{field}: "):
        async with open_store(config, NAMESPACE, BlockLayout("float16", (1_000,))):
            raise AssertionError("it was opened")


async def test_two_lossy_codecs_are_refused(tmp_path: Path) -> None:
    """Two lossy codecs are refused; one codec in two tiers is allowed."""
    with pytest.raises(ValueError, match="disk_codec is int8, expected plain or fp8"):
        async with engine(memory_bytes=ROOM, memory_codec=FP8, disk=tmp_path / "kv", disk_codec=INT8):
            raise AssertionError("it was opened")
    async with engine(memory_bytes=ROOM, memory_codec=INT8, disk=tmp_path / "kv", disk_codec=INT8):
        pass


async def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    """Its files are not touched."""
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(OSError, match=r"is not a folder of KV blocks: it has 'letter\.txt'; give an empty one"):
        async with engine(disk=tmp_path):
            raise AssertionError("it was opened")


def _access() -> Access:
    return Access(time.monotonic())
