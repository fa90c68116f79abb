"""Four processes share a folder and are killed one after the other, for a given time.

`python -m tests.prefix_store.tiers.soak SECONDS` prints operations and problems; status 1 if there are problems.
"""

import asyncio
import contextlib
import functools
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import BadFrame, check_frame
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import Folder
from tests.prefix_store.tiers.blocks import Memory, chain, format_of
from tests.prefix_store.tiers.waiting import until

PROCESSES = 4
ROOT = Path(__file__).resolve().parents[3]
FORMAT = format_of()
CAPACITY = 256 * FORMAT.frame_bytes
_CHAINS, _LENGTH = 60, 12


@dataclass
class Report:
    """The results."""

    kills: int = 0
    operations: int = 0
    blocks_read: int = 0
    most_bytes: int = 0
    problems: list[str] = field(default_factory=list)


async def work(folder: Path, seed: int) -> None:
    """One process: reads chains, compares each block, writes missing ones; prints its progress."""
    choose = random.Random(seed)  # noqa: S311  # reproducible
    tier = DiskTier(folder, FORMAT, CAPACITY, LeastRecentlyUsed)
    operations = blocks_read = 0
    while True:
        number = min(choose.randrange(_CHAINS), choose.randrange(_CHAINS))
        blocks = chain(f"{number}", _LENGTH, root=chain(f"root {number % 5}", 4))
        memory = Memory(_LENGTH)
        count = await tier.read(blocks, memory.all(_LENGTH), Access(time.monotonic()))
        wrong = [place for place in range(_LENGTH) if not _is_right(memory, place, blocks[place], count)]
        bad = tier.counts.bad_frames.total()
        if wrong or bad:
            print(f"WRONG blocks {wrong} of chain {number}, {bad} bad frames", flush=True)
            return
        sources = Memory(_LENGTH).fill(blocks)
        await tier.write(blocks, sources[count:], Access(time.monotonic()))
        operations += 2
        blocks_read += count
        print(operations, blocks_read, flush=True)


def _is_right(memory: Memory, place: int, block: BlockId, restored: int) -> bool:
    return memory.holds(place, block) if place < restored else memory.is_untouched(place)


async def soak(folder: Path, seconds: float, kills: int, seed: int = 0) -> Report:
    """Runs for these seconds and kills, whichever takes longer; then checks every file."""
    report = Report()
    choose = random.Random(seed)  # noqa: S311  # reproducible
    with tempfile.TemporaryDirectory() as said:
        outputs = [Path(said, "0")]
        workers = [await _start(folder, outputs) for _ in range(PROCESSES)]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline or report.kills < kills:
            worker, output = workers.pop(choose.randrange(PROCESSES))
            await until(functools.partial(_has_begun, output), "a process has begun to work", 60)
            await asyncio.sleep(choose.uniform(0.0, 0.3))
            report.most_bytes = max(report.most_bytes, _bytes_in(folder))
            worker.send_signal(signal.SIGKILL)
            await worker.wait()
            report.kills += 1
            workers.append(await _start(folder, outputs))
        for worker, _ in workers:
            worker.send_signal(signal.SIGKILL)
            await worker.wait()
        for output in outputs[1:]:
            _take_into(report, output.read_text().splitlines())
    if report.most_bytes > CAPACITY:
        report.problems.append(f"{report.most_bytes} bytes were on disk, the capacity is {CAPACITY}")
    await _look_through(folder, report)
    return report


def _has_begun(output: Path) -> bool:
    return output.stat().st_size > 0


async def _start(folder: Path, outputs: list[Path]) -> tuple[asyncio.subprocess.Process, Path]:
    number = len(outputs)
    outputs.append(outputs[0].with_name(str(number)))
    command = [sys.executable, "-m", "tests.prefix_store.tiers.soak", "--worker", str(folder), str(number)]
    with outputs[-1].open("wb") as output:
        return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=output, stderr=output), outputs[-1]


def _take_into(report: Report, lines: list[str]) -> None:
    """The last whole line counts; a line without two numbers is a problem, a truncated one is not."""
    counted = [line.split() for line in lines if len(line.split()) == 2 and line.replace(" ", "").isdigit()]
    if counted:
        report.operations += int(counted[-1][0])
        report.blocks_read += int(counted[-1][1])
    report.problems += [line for line in lines if not line.replace(" ", "").isdigit()]


def _bytes_in(folder: Path) -> int:
    total = 0
    for part in ("blocks", "writing"):
        for place, _, files in os.walk(folder / part):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(place, file)).st_size
    return total


async def _look_through(folder: Path, report: Report) -> None:
    """Checks that every file is a whole frame, and that a new process finds a consistent state without drafts."""
    found = Folder.find(folder)
    report.problems += _torn(found)
    tier = DiskTier(folder, FORMAT, CAPACITY, LeastRecentlyUsed)
    await until(lambda: not os.listdir(found.drafts) and len(os.listdir(found.journals)) == 1, "all is tidied up")
    await tier.close()
    if _bytes_in(folder) > CAPACITY:
        report.problems.append(f"{_bytes_in(folder)} bytes are left, the capacity is {CAPACITY}")


def _torn(folder: Folder) -> list[str]:
    problems = []
    for block in folder.stored():
        data = Path(folder.block(block.name)).read_bytes()
        try:
            check_frame(memoryview(data), block.name.key, block.name.parent)
        except BadFrame as error:
            problems.append(f"{block.name} is torn: {error}")
    return problems


def main() -> int:
    if sys.argv[1] == "--worker":
        asyncio.run(work(Path(sys.argv[2]), int(sys.argv[3])))
        return 1
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(soak(Path(folder, "kv"), float(sys.argv[1]), 1, seed=int(time.time())))
    print(report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
