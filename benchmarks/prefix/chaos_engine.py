"""A process that keeps, restores, pins and discards blocks at random: `python -m benchmarks.prefix.chaos_engine PLAN`.

After each operation it says in a line of JSON what it has done so far. Every block's content follows from its key, so
every restored byte is compared. A line on its standard input brings it to rest; it then says what its memory holds,
and stays until its standard input ends.
"""

import asyncio
import functools
import logging
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import uvloop
import xxhash
from aiohttp import web

from benchmarks.prefix.claims import repair
from prefix_store.codecs.registry import CODECS
from prefix_store.eviction.access import Access
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import HEADER_BYTES
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments
from prefix_store.store.config import StoreConfig
from prefix_store.store.open_store import OpenStore, open_store
from prefix_store.store.store import PrefixStore, Restored
from prefix_store.tiers.cancellation import CancelToken

LAYOUT = BlockLayout("float16", (2, 2, 2, 16, 32), "lphtd")
_LAYERS, _PARTS = 2, 2
_CHAINS, _LENGTH, _ROOTS, _SHARED = 48, 24, 6, 8
_MEMORY_BLOCKS, _DISK_BLOCKS = 96, 256
_TASKS = 3
_UNTOUCHED = 0xEE
_LONGEST_BEFORE_HALT = 0.005
_OPERATIONS = {"restore": 40, "keep": 40, "locate": 8, "touch": 4, "pin": 3, "unpin": 3, "discard": 2}


class Plan(msgspec.Struct, frozen=True):
    """What one process is to do, and with whom."""

    redis: str
    namespace: bytes
    folder: str
    disk_codec: str
    name: str
    port: int
    secret: str
    seed: int

    def config(self) -> StoreConfig:
        """A small memory, and a disk that all share."""
        codec = CODECS[self.disk_codec]
        return StoreConfig(
            memory_bytes=_MEMORY_BLOCKS * (LAYOUT.nbytes + HEADER_BYTES),
            disk=Path(self.folder),
            disk_bytes=disk_bytes(self.disk_codec),
            disk_codec=codec,
            index=self.redis,
            name=self.name,
            address=f"http://127.0.0.1:{self.port}",
            secret=self.secret,
        )


class Said(msgspec.Struct, kw_only=True):
    """What a process has done since its start; blocks unless the name says otherwise."""

    operations: int = 0
    restored: dict[str, int] = {}
    """By place."""
    wrong: list[str] = []
    """Every block that did not hold what it had to, in words."""
    bad_frames: int = 0
    """Found out, and not restored."""
    halted: int = 0
    """Restores that were ended from another thread."""
    faults: list[str] = []
    """Errors that nobody handled."""
    held: list[bytes] | None = None
    """Stored keys in its memory, once it has come to rest."""


def disk_bytes(codec: str) -> int:
    """What all processes together may have on disk."""
    return _DISK_BLOCKS * (HEADER_BYTES + CODECS[codec].payload_bytes(LAYOUT))


def chain(namespace: bytes, number: int) -> list[BlockId]:
    """One of those that all processes use; some begin alike."""
    blocks: list[BlockId] = []
    for place in range(_LENGTH):
        name = f"root {number % _ROOTS} {place}" if place < _SHARED else f"{number} {place}"
        parent = blocks[-1].key if blocks else namespace
        tokens = xxhash.xxh3_128_digest(name.encode())
        blocks.append(BlockId(namespace, xxhash.xxh3_128_digest(parent + tokens), parent, tokens))
    return blocks


class Memory:
    """KV memory [layers, parts, blocks, bytes] of one task."""

    def __init__(self) -> None:
        self.bytes = np.full((_LAYERS, _PARTS, _LENGTH, LAYOUT.nbytes // _LAYERS // _PARTS), _UNTOUCHED, np.uint8)

    def segments(self, first: int, last: int) -> list[Segments]:
        return [[self.bytes[:, :, block]] for block in range(first, last)]

    def block(self, place: int) -> Bytes:
        return self.bytes[:, :, place].ravel()


class Engine:
    """Does as it likes with a store, and looks at all that comes back."""

    def __init__(self, plan: Plan, opened: OpenStore) -> None:
        self.said = Said()
        self._plan = plan
        self._store: PrefixStore = opened.store
        self._codec = CODECS[plan.disk_codec]
        self._choose = random.Random(plan.seed)  # noqa: S311  # the same each time
        self._chains = [chain(plan.namespace, number) for number in range(_CHAINS)]

    async def work(self, until: asyncio.Event) -> None:
        """One operation after the other, until the event is set."""
        while not until.is_set():
            kind = self._choose.choices(list(_OPERATIONS), list(_OPERATIONS.values()))[0]
            number = min(self._choose.randrange(_CHAINS), self._choose.randrange(_CHAINS))
            blocks = self._chains[number][: self._choose.randint(1, _LENGTH)]
            await getattr(self, f"_{kind}")(blocks)
            self.said.operations += 1
            self.say()
            await asyncio.sleep(0)

    def say(self) -> None:
        """One line."""
        counts = [tier.counts for tier in self._store.tiers.values()]
        if self._store.peers is not None:
            counts.append(self._store.peers.counts)
        self.said.bad_frames = sum(count.bad_frames.total() for count in counts)
        self.said.restored = dict(self._store.figures.restored)
        sys.stdout.buffer.write(msgspec.json.encode(self.said) + b"\n")
        sys.stdout.buffer.flush()

    async def _locate(self, blocks: Sequence[BlockId]) -> None:
        location = await self._store.locate(blocks)
        if location.blocks > len(blocks):
            self.said.wrong.append(f"{location.blocks} of {len(blocks)} blocks were located")

    async def _restore(self, blocks: Sequence[BlockId]) -> None:
        choose, memory, cancel = self._choose, Memory(), CancelToken()
        first = choose.choice([0, 0, choose.randrange(len(blocks))])
        location = await self._store.locate(blocks)
        into = memory.segments(first, len(blocks))
        seconds = choose.choice([None, None, 0.0005, 0.01])
        taken_back: list[Bytes] = []
        timer = None
        if choose.random() < 0.2:
            self.said.halted += 1
            timer = threading.Timer(choose.uniform(0.0, _LONGEST_BEFORE_HALT), _take_back, (cancel, memory, taken_back))
            timer.start()
        access = Access(time.monotonic(), one_shot=choose.random() < 0.1)
        restored = await self._store.restore(blocks, into, location, seconds, access, cancel)
        if timer is not None:
            await asyncio.to_thread(timer.join)
            if not np.array_equal(taken_back[0], memory.bytes):
                self.said.wrong.append("memory was touched after it had been taken back")
        self._check(blocks, memory, first, restored)
        if choose.random() < 0.5:
            access.end(choose.randrange(500))

    def _check(self, blocks: Sequence[BlockId], memory: Memory, first: int, restored: Restored) -> None:
        lossy_from = len(blocks) if restored.lossy_from is None else restored.lossy_from
        for place in range(_LENGTH):
            held = memory.block(place)
            if first <= place < first + restored.blocks:
                right = np.array_equal(held, content(blocks[place].key))
                right = right or (place >= lossy_from and np.array_equal(held, self._lossy(blocks[place].key)))
            else:
                right = bool((held == _UNTOUCHED).all())
            if not right:
                self.said.wrong.append(f"block {place} of {first} to {first + restored.blocks}, lossy {lossy_from}")

    async def _keep(self, blocks: Sequence[BlockId]) -> None:
        choose, memory, cancel = self._choose, Memory(), CancelToken()
        location = await self._store.locate(blocks, everywhere=False)
        first = choose.choice([0, location.kept, choose.randrange(len(blocks))])
        for place in range(len(blocks)):
            memory.bytes[:, :, place] = content(blocks[place].key).reshape(_LAYERS, _PARTS, -1)
        timer = None
        if choose.random() < 0.1:
            timer = threading.Timer(choose.uniform(0.0, _LONGEST_BEFORE_HALT), _spoil, (cancel, memory))
            timer.start()
        access = Access(time.monotonic(), one_shot=choose.random() < 0.1)
        sources = memory.segments(first, len(blocks))
        await self._store.keep(blocks, sources, access, exact=choose.random() < 0.9, cancel=cancel)
        if timer is not None:
            await asyncio.to_thread(timer.join)

    async def _touch(self, blocks: Sequence[BlockId]) -> None:
        location = await self._store.locate(blocks, everywhere=False)
        await self._store.touch(blocks, location, Access(time.monotonic()))

    async def _pin(self, blocks: Sequence[BlockId]) -> None:
        await self._store.pin(blocks)

    async def _unpin(self, blocks: Sequence[BlockId]) -> None:
        await self._store.unpin(blocks)

    async def _discard(self, blocks: Sequence[BlockId]) -> None:
        keep = self._choose.randrange(len(blocks))
        for tier in self._store.tiers.values():
            await tier.discard(blocks, keep)

    def _lossy(self, key: bytes) -> Bytes:
        return _lossy(self._codec.name, key)


@functools.cache
def content(key: bytes) -> Bytes:
    """What a block holds: float16 numbers, as bytes."""
    numbers = np.random.default_rng(int.from_bytes(key[:8], "little")).standard_normal(LAYOUT.nbytes // 2)
    return numbers.astype(np.float16).view(np.uint8)


@functools.cache
def _lossy(codec: str, key: bytes) -> Bytes:
    """What comes back of it from a codec."""
    stored = np.empty(CODECS[codec].payload_bytes(LAYOUT), np.uint8)
    back = np.empty(LAYOUT.nbytes, np.uint8)
    CODECS[codec].encode([content(key)], LAYOUT, stored)
    CODECS[codec].decode(stored, LAYOUT, [back])
    return back


def _take_back(cancel: CancelToken, memory: Memory, seen: list[Bytes]) -> None:
    """In another thread, as an engine does it."""
    cancel.set()
    seen.append(memory.bytes.copy())


def _spoil(cancel: CancelToken, memory: Memory) -> None:
    """Gives the sources to somebody else, who writes there."""
    cancel.set()
    memory.bytes[:] = _UNTOUCHED


class _Unhandled(logging.Handler):
    """Notes what went wrong where nobody looked."""

    def __init__(self, said: Said) -> None:
        super().__init__(logging.ERROR)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        # A server may complain of who was killed, or gave up, in the midst of a question.
        if not isinstance(error, ConnectionError) and (error is not None or record.name == "asyncio"):
            self._said.faults.append(self.format(record))


async def main(plan: Plan) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with open_store(plan.config(), plan.namespace, LAYOUT) as opened:
        application = web.Application()
        assert opened.server is not None  # noqa: S101  # there is a secret
        application.add_routes(opened.server.routes())
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", plan.port, reuse_address=True).start()
        engine = Engine(plan, opened)
        logging.getLogger().addHandler(_Unhandled(engine.said))
        rest = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_TASKS):
                tasks.create_task(engine.work(rest))
            await lines.readline()
            rest.set()
        owners, held = opened.store.owners, opened.store.tiers["memory"].inventory()
        assert owners is not None  # noqa: S101  # there is an index
        await repair(plan.redis, owners, "memory", plan.name, held)
        engine.said.held = list(held)
        engine.say()
        await lines.readline()
        await runner.cleanup()


if __name__ == "__main__":
    uvloop.run(main(msgspec.json.decode(sys.argv[1], type=Plan)))
