"""A disk may be full, absent or damaged: no damaged block is used, and every answer is right and in time."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.backend.prefixes.conftest import Start
from tests.backend.prefixes.engine_process import EngineProcess, fresh, start_all
from tests.backend.prefixes.keeping import frames, writing
from tests.backend.prefixes.models import BLOCK
from tests.cache.entries.entry_examples import until
from tests.prefix_store.tiers.full_disk import ANYWHERE, MOUNTED, Fault, tmpfs

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOKENS = 300
BLOCKS = TOKENS // BLOCK
WHOLE = BLOCKS * BLOCK
Damage = Callable[[Path, bytes], bytes]
"""What becomes of a file; the bytes are those of another block's."""


def cut(file: Path, other: bytes) -> bytes:
    return file.read_bytes()[:-1000]


def cut_in_the_head(file: Path, other: bytes) -> bytes:
    return file.read_bytes()[:20]


def emptied(file: Path, other: bytes) -> bytes:
    return b""


def flipped(file: Path, other: bytes) -> bytes:
    """One bit of the keys and values."""
    held = bytearray(file.read_bytes())
    held[len(held) // 2] ^= 1
    return bytes(held)


def flipped_in_the_head(file: Path, other: bytes) -> bytes:
    held = bytearray(file.read_bytes())
    held[8] ^= 1
    return bytes(held)


def grown(file: Path, other: bytes) -> bytes:
    return file.read_bytes() + bytes(1000)


def replaced(file: Path, other: bytes) -> bytes:
    """Whole and with a checksum that is right, but of other tokens."""
    return other


@dataclass
class Pair:
    """Two engines with one folder; what the one writes the other reads."""

    disk: Path
    writer: EngineProcess
    reader: EngineProcess

    async def written(self, tokens: int = TOKENS) -> tuple[list[int], list[Path]]:
        """A new prompt, and the files of its blocks."""
        prompt = fresh(tokens)
        async with writing(self.disk, tokens // BLOCK) as files:
            await self.writer.ask(prompt)
        return prompt, files

    async def works(self) -> None:
        """Returns when a new prompt is stored and read; on a busy machine a fetch may end early, so it tries again."""
        async with asyncio.timeout(60):
            restored = 0
            while restored < WHOLE:
                prompt, _ = await self.written()
                restored = (await self.reader.ask(prompt)).restored


def pair_on(place: Path, launch: Start, secret: Path) -> Pair:
    disk = place / "kv"
    options = ("--prefix-disk", str(disk), "--prefix-disk-size", "16MiB", "--prefix-secret-file", str(secret))
    engines = [launch(*options), launch(*options)]
    start_all(engines)
    return Pair(disk, *engines)


@pytest.fixture(scope="module")
def pair(launch: Start, secret: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair_on(tmp_path_factory.mktemp("disk"), launch, secret)


@pytest.fixture(scope="module")
def small(launch: Start, secret: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """On a file system that is full with thirty blocks."""
    place = tmp_path_factory.mktemp("disk") / "small"
    with tmpfs(place):
        small = pair_on(place, launch, secret)
        yield small
        small.writer.stop()
        small.reader.stop()


DAMAGES = [cut, cut_in_the_head, emptied, flipped, flipped_in_the_head, grown, replaced]


@pytest.mark.parametrize("damage", DAMAGES, ids=[damage.__name__ for damage in DAMAGES])
async def test_a_damaged_frame_is_not_used_and_removed(pair: Pair, plain: EngineProcess, damage: Damage) -> None:
    """A damaged block in the middle of a prompt is removed, and neither it nor a later one is used."""
    _, others = await pair.written(BLOCK + 1)
    prompt, files = await pair.written()
    bad = files[BLOCKS // 2]
    damaged = damage(bad, others[0].read_bytes())
    bad.write_bytes(damaged)
    expected = await plain.ask(prompt)
    answer = await pair.reader.ask(prompt)
    assert answer.choices == expected.choices
    assert answer.restored < WHOLE

    async def gone_or_right() -> bool:
        return not bad.exists() or bad.read_bytes() != damaged

    await until(gone_or_right, 20.0, 0.02)
    assert (await pair.reader.ask(prompt)).choices == expected.choices
    await pair.works()


async def test_no_block_behind_a_missing_one_is_used(pair: Pair, plain: EngineProcess) -> None:
    """No block behind a removed file is used, and the answer is right."""
    prompt, files = await pair.written()
    files[BLOCKS // 2].unlink()
    answer = await pair.reader.ask(prompt)
    assert answer.restored < WHOLE
    assert answer.choices == (await plain.ask(prompt)).choices
    await pair.works()


async def test_frames_under_other_blocks_names_are_not_used(pair: Pair, plain: EngineProcess) -> None:
    """Frames that were swapped within a prompt are not used."""
    prompt, files = await pair.written()
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(content)
    answer = await pair.reader.ask(prompt)
    assert answer.restored == 0
    assert answer.choices == (await plain.ask(prompt)).choices


FAULTS = {**{name: ANYWHERE[name] for name in ANYWHERE if name != "files-too-large"}, **MOUNTED}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_a_disk_without_writes_still_serves_reads(
    request: pytest.FixtureRequest, plain: EngineProcess, fault: Fault
) -> None:
    """A full, read-only or damaged disk serves its blocks, and takes new ones once it accepts writes."""
    pair: Pair = request.getfixturevalue("small" if fault in MOUNTED.values() else "pair")
    prompt, _ = await pair.written(100)
    with fault(pair.disk.parent):
        for _ in range(2):
            new = fresh(TOKENS)
            assert (await pair.writer.ask(new)).choices == (await plain.ask(new)).choices
        read = await pair.reader.ask(prompt)
        assert read.restored == 100 // BLOCK * BLOCK
        assert read.choices == (await plain.ask(prompt)).choices

    async def is_written() -> bool:
        before = set(frames(pair.disk))
        await pair.writer.ask(fresh(100))
        return bool(set(frames(pair.disk)) - before)

    await until(is_written, 30.0, 0.1)


async def test_a_hanging_disk_delays_neither_answer_nor_stop(
    pair: Pair, launch: Start, secret: Path, plain: EngineProcess
) -> None:
    """A prompt on a disk that hangs is computed within the deadline, and the engine still stops."""
    prompt, files = await pair.written()
    first = next(file for file in files if file.name.endswith("-first"))
    first.unlink()
    os.mkfifo(first)  # who opens it for reading waits for a writer
    engine = launch("--prefix-disk", str(pair.disk), "--prefix-disk-size", "16MiB", "--prefix-secret-file", str(secret))
    start_all([engine])
    answer = await engine.ask(prompt)
    assert answer.choices == (await plain.ask(prompt)).choices
    assert answer.restored == 0
    engine.stop()
    first.unlink()


async def test_engines_answer_after_their_folder_is_removed(pair: Pair, plain: EngineProcess) -> None:
    """Two engines whose folder is removed keep giving right answers."""
    prompt, _ = await pair.written()
    while pair.disk.exists():  # somebody may write between two of its steps
        shutil.rmtree(pair.disk, ignore_errors=True)
    for asked in (prompt, fresh(TOKENS), fresh(TOKENS)):
        expected = await plain.ask(asked)
        for engine in (pair.reader, pair.writer):
            assert (await engine.ask(asked)).choices == expected.choices
