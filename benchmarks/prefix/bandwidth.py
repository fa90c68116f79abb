"""How fast KV blocks come back from each tier, against memcpy of the same bytes to the same places.

As a program it makes the measurements, in a process of its own: `python -m benchmarks.prefix.bandwidth --peer URL`;
with `--serve PORT` it is that peer.
"""

import argparse
import asyncio
import functools
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from aiohttp import web

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, cores, free_port, run_on_subject_core, server
from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.codecs.registry import CODECS, PLAIN
from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import HEADER_BYTES
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments, scatter
from prefix_store.peers.client import PeerClient
from prefix_store.peers.exchange import Address
from prefix_store.peers.server import BlockServer
from prefix_store.tiers.disk.disk_tier import DiskTier
from prefix_store.tiers.host_memory import HostMemory

_ROUNDS, _QUICK_ROUNDS = 15, 2
_TIMES = 3
_SECRET, _EPOCH = "of this measurement", "1"
_SMALL = BlockLayout("float16", (30, 2, 3, 16, 64), "lphtd")
_LARGE = BlockLayout("float16", (32, 2, 8, 32, 64), "lphtd")
_COUNTS = {_SMALL: 100, _LARGE: 18}
_METHOD = """\
A prefix of 100 blocks as SmolLM2-135M has them (368,640 bytes each: 60 pieces of 6,144 bytes, float16), restored by one
call of a tier into blocks in a random order; and 18 blocks of 2 MiB (64 pieces of 32 KiB). The reference copies the
same bytes from contiguous memory into the same pieces, one NumPy call a block, by turns with the tiers in the same
process on one core. Both sides read more than the processor's caches hold. A round is the shortest of three times.
Every restore includes the event loop, the thread, and the check of each frame: all fields and the xxh3 checksum of all
bytes. The disk's files are in the page cache. The peer is another process on the other core, over TCP on loopback. The
rows for mapped files are what the disk tier does not do (docs/decisions/018-prefix-tiers.md): map each file, check it,
copy from it."""


Restore = Callable[[], Awaitable[int]]


class Measured(msgspec.Struct, kw_only=True):
    """Bytes of KV restored per second, for each round, by what restored them; `memcpy` is the reference."""

    small: dict[str, list[float]]
    large: dict[str, list[float]]


async def measure(quick: bool) -> Figure:
    rounds = _QUICK_ROUNDS if quick else _ROUNDS
    port = free_port()
    serve = [sys.executable, "-m", "benchmarks.prefix.bandwidth", "--serve", str(port)]
    async with server(serve, port, cores().load) as peer:
        found = msgspec.json.decode(
            await run_on_subject_core("benchmarks.prefix.bandwidth", "--rounds", str(rounds), "--peer", peer.url),
            type=Measured,
        )
    small, large = (_rows(per_second) for per_second in (found.small, found.large))
    least = Target("least", 0.5)
    rows = (
        small("host memory", "100 blocks from host memory", least),
        small("disk", "100 blocks from disk, page cache warm", least),
        small("peer", "100 blocks from a peer on this host", None),
        small("mapped", "100 blocks from mapped files (not used)", None),
        small("host memory, int8", "100 blocks from host memory, kept as int8", None),
        small("host memory, fp8", "100 blocks from host memory, kept as fp8", None),
        small("disk, int8", "100 blocks from disk, kept as int8", None),
        small("disk, fp8", "100 blocks from disk, kept as fp8", None),
        large("host memory", "18 blocks of 2 MiB from host memory", least),
        large("disk", "18 blocks of 2 MiB from disk, page cache warm", least),
        large("mapped", "18 blocks of 2 MiB from mapped files (not used)", None),
    )
    return Figure(figure="prefix_bandwidth", title="Restoring KV blocks", method=_METHOD, rows=rows)


def _rows(per_second: dict[str, list[float]]) -> Callable[[str, str, Target | None], Row]:
    def row(name: str, what: str, target: Target | None) -> Row:
        pairs = list(zip(per_second[name], per_second["memcpy"], strict=True))
        return Row(
            what=f"{what}, against memcpy",
            unit="",
            rounds=tuple(restored / copied for restored, copied in pairs),
            target=target,
            beside=tuple({"GB/s": restored / 1e9, "memcpy GB/s": copied / 1e9} for restored, copied in pairs),
        )

    return row


@dataclass
class Prefix:
    """A chain of blocks, what they hold, and places for them in an engine's memory."""

    layout: BlockLayout

    def __post_init__(self) -> None:
        count = _COUNTS[self.layout]
        generator = np.random.default_rng(7)
        layers, parts, *of_part = self.layout.shape
        # Two places a block, half of them of other sequences.
        shape = (layers, parts, 2 * count, int(np.prod(of_part)))
        self.memory = np.ones(shape, np.float16)
        self.places = generator.permutation(2 * count)[:count]
        numbers = generator.standard_normal((count, layers, parts, shape[-1]), np.float32).astype(np.float16)
        self.contents: Bytes = numbers.view(np.uint8).reshape(count, -1)
        self.chain: list[BlockId] = []
        for number in range(count):
            parent = self.chain[-1].key if self.chain else bytes(16)
            tokens = xxhash.xxh3_128_digest(number.to_bytes(8, "little"))
            self.chain.append(BlockId(bytes(16), xxhash.xxh3_128_digest(parent + tokens), parent, tokens))

    def into(self) -> list[Segments]:
        return [[self.memory[:, :, place]] for place in self.places]

    def sources(self) -> list[Segments]:
        return [[content] for content in self.contents]

    def copy(self) -> int:
        for content, place in zip(self.contents, self.places, strict=True):
            target = self.memory[:, :, place]
            np.copyto(target, content.view(np.float16).reshape(target.shape))
        return len(self.chain)

    def check(self, name: str, exact: bool) -> None:
        """Raises CannotMeasure where what was restored is not what was stored."""
        for content, place in zip(self.contents, self.places, strict=True):
            held = self.memory[:, :, place].ravel()
            wanted = content.view(np.float16)
            off = np.abs(held.astype(np.float32) - wanted.astype(np.float32)).max()
            if off > (0.0 if exact else 0.5):
                raise CannotMeasure(f"{name} restored numbers that are off by {off}")


async def measure_here(layout: BlockLayout, rounds: int, folder: Path, peer: str | None) -> dict[str, list[float]]:
    """One size of blocks, in this process."""
    prefix = Prefix(layout)
    async with AsyncExitStack() as closing:
        restores = await _restores(prefix, folder, closing)
        if peer is not None:
            client = PeerClient(_SECRET)
            closing.push_async_callback(client.close)
            address, plain = Address(peer, _EPOCH), FrameFormat(layout, PLAIN)
            restores["peer"] = lambda: client.read(address, prefix.chain, prefix.into(), plain)
        # In a thread as well, so that both sides are woken and preempted alike.
        restores = {"memcpy": functools.partial(asyncio.to_thread, prefix.copy), **restores}
        found: dict[str, list[float]] = {name: [] for name in restores}
        for number in range(-1, rounds):
            taken = {name: await _seconds(name, restore, prefix, number) for name, restore in restores.items()}
            if number >= 0:  # the first time is for the page cache, the connection and the lazy imports
                for name, seconds in taken.items():
                    found[name].append(prefix.contents.nbytes / seconds)
        return found


async def _seconds(name: str, restore: Restore, prefix: Prefix, number: int) -> float:
    """The shortest of three times; in the first round what was restored is compared."""
    times = []
    for _ in range(_TIMES):
        prefix.memory[:] = 1
        began = time.perf_counter()
        restored = await restore()
        times.append(time.perf_counter() - began)
        if restored != len(prefix.chain):
            raise CannotMeasure(f"{name} restored {restored} of {len(prefix.chain)} blocks")
    if number < 0:
        prefix.check(name, exact=", " not in name)
    return min(times)


async def _restores(prefix: Prefix, folder: Path, closing: AsyncExitStack) -> dict[str, Restore]:
    """What restores the prefix into its places, by name, from tiers that have it."""
    count = len(prefix.chain)
    restores: dict[str, Restore] = {}
    for codec in CODECS.values():
        form = FrameFormat(prefix.layout, codec)
        (folder / codec.name).mkdir(parents=True)
        host = HostMemory(form, 2 * count * form.frame_bytes, LeastRecentlyUsed())
        disk = DiskTier(folder / codec.name, form, 64 * count * form.frame_bytes, LeastRecentlyUsed)
        for name, tier in (("host memory", host), ("disk", disk)):
            closing.push_async_callback(tier.close)
            if await tier.write(prefix.chain, prefix.sources(), Access(0.0)) != count:
                raise CannotMeasure(f"{name} did not keep the blocks: {tier.counts}")
            label = name if codec is PLAIN else f"{name}, {codec.name}"
            restores[label] = functools.partial(_read, tier, prefix)
    form = FrameFormat(prefix.layout, PLAIN)
    files = [next((folder / "plain" / "blocks").glob(f"*/{block.key.hex()}-*")) for block in prefix.chain]
    restores["mapped"] = functools.partial(asyncio.to_thread, _restore_mapped, form, prefix, files)
    return restores


async def _read(tier: HostMemory | DiskTier, prefix: Prefix) -> int:
    return await tier.read(prefix.chain, prefix.into(), Access(1.0))


def _restore_mapped(form: FrameFormat, prefix: Prefix, files: list[Path]) -> int:
    restored = 0
    for block, file, into in zip(prefix.chain, files, prefix.into(), strict=True):
        opened = os.open(file, os.O_RDONLY)
        with mmap.mmap(opened, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as mapping:
            os.close(opened)
            frame = np.frombuffer(mapping, np.uint8)
            form.verify(block, frame)
            scatter(frame[HEADER_BYTES:], into)
            del frame
        restored += 1
    return restored


async def _serve(port: int) -> None:
    prefix = Prefix(_SMALL)
    form = FrameFormat(_SMALL, PLAIN)
    tier = HostMemory(form, 2 * len(prefix.chain) * form.frame_bytes, LeastRecentlyUsed())
    await tier.write(prefix.chain, prefix.sources(), Access(0.0))
    application = web.Application()
    application.add_routes(BlockServer([tier], _SECRET, _EPOCH).routes())
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


async def _measure_all(rounds: int, peer: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        small = await measure_here(_SMALL, rounds, Path(folder, "small"), peer)
        large = await measure_here(_LARGE, rounds, Path(folder, "large"), None)
    return Measured(small=small, large=large)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix.bandwidth")
    parser.add_argument("--serve", type=int)
    parser.add_argument("--rounds", type=int, default=_QUICK_ROUNDS)
    parser.add_argument("--peer")
    options = parser.parse_args()
    if options.serve:
        asyncio.run(_serve(options.serve))
        return 0
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_measure_all(options.rounds, options.peer))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
