"""Stores that share an index and read from each other: real engines, a real Valkey, real sockets."""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from prefix_store.codecs.scaled import INT8
from prefix_store.frames.block_id import BlockId
from prefix_store.index.owner import Details, Owner
from prefix_store.peers.protocol import EPOCH_HEADER, FRAMES_TYPE
from prefix_store.store.location import Location, PeerRun
from prefix_store.tiers.cancellation import CancelToken
from prefix_store.tiers.disk.disk_tier import DiskTier
from tests.cache.valkey import Valkey
from tests.prefix_store.peers.world import EPOCH, impostor
from tests.prefix_store.store.world import ROOM, engine
from tests.prefix_store.tiers.blocks import Memory, chain, format_of
from tests.prefix_store.tiers.waiting import until

CHAIN = chain("a prompt", 10)
FORMAT = format_of()


def holds(memory: Memory, blocks: list[BlockId], count: int) -> bool:
    return all(memory.holds(place, blocks[place]) for place in range(count))


def frames_of(blocks: list[BlockId]) -> bytes:
    memory, frames = Memory(len(blocks)), np.empty((len(blocks), FORMAT.frame_bytes), np.uint8)
    for block, source, frame in zip(blocks, memory.fill(blocks), frames, strict=True):
        FORMAT.seal(block, source, frame)
    return frames.tobytes()


@asynccontextmanager
async def stuck_peer(blocks: list[BlockId]) -> AsyncIterator[tuple[Owner, asyncio.Event]]:
    """A peer that sends these blocks and then hangs; the event is set after the blocks."""
    gave, leave = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={EPOCH_HEADER: EPOCH, "content-type": FRAMES_TYPE})
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(frames_of(blocks))
        gave.set()
        await leave.wait()
        return response

    async with impostor(answer) as address:
        yield Owner("stuck", 1, Details(address.url, address.epoch)), gave
        leave.set()


async def test_what_one_engine_has_another_restores(valkey: Valkey) -> None:
    """Blocks are restored over HTTP, bit by bit, and the claims are extended."""
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
    ):
        await a.keep(CHAIN)
        location = await b.finds(CHAIN, 10)
        assert location.leading == {"memory": 0}
        (run,) = location.peers
        assert ([owner.name for owner in run.owners], run.first, run.until) == (["a"], 0, 10)
        memory = Memory(10)
        assert (await b.restore(CHAIN, location, memory)).blocks == 10
        assert holds(memory, CHAIN, 10)
        assert b.store.figures.restored == {"peers": 10}


async def test_the_beginning_comes_from_memory_and_the_rest_from_a_peer(valkey: Valkey) -> None:
    """Steps follow each other without a gap; restored blocks can be stored."""
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
    ):
        await a.keep(CHAIN)
        await b.keep(CHAIN[:4])
        location = await b.finds(CHAIN, 10)
        memory = Memory(10)
        assert (await b.restore(CHAIN, location, memory)).blocks == 10
        assert holds(memory, CHAIN, 10)
        assert b.store.figures.restored == {"memory": 4, "peers": 6}


async def test_a_lossy_peer_gives_what_no_exact_one_has(valkey: Valkey, tmp_path: Path) -> None:
    """The first blocks come exact from one peer, the rest lossy from another."""
    async with (
        engine(valkey.url, "exact", memory_bytes=ROOM) as exact,
        engine(valkey.url, "lossy", memory_bytes=ROOM, memory_codec=INT8) as lossy,
        engine(valkey.url, "c", memory_bytes=ROOM, memory_codec=INT8) as c,
        engine(valkey.url, "d", memory_bytes=ROOM) as d,
    ):
        await exact.keep(CHAIN[:6])
        await lossy.keep(CHAIN)
        memory = Memory(10)
        restored = await c.restore(CHAIN, await c.finds(CHAIN, 10), memory)
        assert (restored.blocks, restored.lossy_from) == (10, 6)
        assert holds(memory, CHAIN, 6)
        assert (await d.finds(CHAIN, 6)).blocks == 6  # it could not read int8


async def test_a_common_disk_is_read_and_not_asked_for(valkey: Valkey, tmp_path: Path) -> None:
    """Blocks on a shared disk are not fetched from the peer that also has them."""
    async with (
        engine(valkey.url, "a", disk=tmp_path / "kv") as a,
        engine(valkey.url, "b", disk=tmp_path / "kv") as b,
        engine(valkey.url, "c", memory_bytes=ROOM) as c,
    ):
        await a.keep(CHAIN)
        assert (await c.finds(CHAIN, 10)).peers  # the index has them
        assert (await b.store.locate(CHAIN)) == Location({"disk": 10})


async def test_who_only_has_others_asks_them(valkey: Valkey) -> None:
    """An engine without tiers finds blocks at peers only."""
    async with engine(valkey.url, "a", memory_bytes=ROOM) as a, engine(valkey.url, "b") as b:
        await a.keep(CHAIN)
        memory = Memory(10)
        assert (await b.restore(CHAIN, await b.finds(CHAIN, 10), memory)).blocks == 10
        assert (await b.store.locate(CHAIN, everywhere=False)).blocks == 0


async def test_a_lie_of_the_index_costs_a_miss_and_is_told_once(valkey: Valkey) -> None:
    """Missing blocks are withdrawn from the index, the others stay."""
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
    ):
        await a.keep(CHAIN[:4])
        await a.owners.publish("memory", [block.key for block in CHAIN])
        await a.index.flush()
        memory = Memory(10)
        assert (await b.restore(CHAIN, await b.finds(CHAIN, 10), memory)).blocks == 4
        assert holds(memory, CHAIN, 4)
        await b.index.flush()
        assert await a.claims() == {"a": 4}
        assert (await b.finds(CHAIN, 4)).blocks == 4


async def test_what_is_evicted_is_not_found_any_more(valkey: Valkey) -> None:
    """The tier's evictions are withdrawn from the index."""
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
    ):
        await a.keep(CHAIN)
        await b.finds(CHAIN, 10)
        await a.store.tiers["memory"].discard(CHAIN, 3)
        await a.index.flush()
        assert (await b.finds(CHAIN, 3)).blocks == 3


async def test_a_block_that_is_evicted_during_a_read_is_a_miss(valkey: Valkey) -> None:
    """Blocks that arrived before are right, the others are not touched, and the index has only those that are left."""
    long = chain("a long prompt", 2_000)
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
    ):
        await a.keep(long)
        location = await b.finds(long, 2_000)
        assert a.opened.server is not None
        memory = Memory(2_000)
        restoring = asyncio.create_task(b.restore(long, location, memory))
        while a.opened.server.frames < 100 and not restoring.done():  # noqa: ASYNC110 (to evict in the midst of the answer)
            await asyncio.sleep(0)
        await a.store.tiers["memory"].discard(long, 50)
        restored = (await restoring).blocks
        assert 100 <= restored < 2_000
        assert holds(memory, long, restored)
        await a.index.flush()
        await b.index.flush()
        assert await a.claims() == {"a": 50}
        assert (await b.restore(long, await b.finds(long, 50), Memory(2_000))).blocks == 50


async def test_a_halt_says_nothing_about_a_peer(valkey: Valkey) -> None:
    """The peer's blocks stay in the index, and it is not skipped."""
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
        stuck_peer(CHAIN[:3]) as (stuck, gave),
    ):
        await a.keep(CHAIN)
        location = await b.finds(CHAIN, 10)
        cancel = CancelToken()
        cancel.set()
        assert (await b.restore(CHAIN, location, Memory(10), cancel=cancel)).blocks == 0
        await b.index.flush()
        assert await a.claims() == {"a": 10}
        (real,) = location.peers[0].owners
        lied = PeerRun((Owner(real.name, real.epoch, stuck.details),), FORMAT, 0, 10)
        memory, cancel = Memory(10), CancelToken()
        restoring = asyncio.create_task(b.restore(CHAIN, Location({}, (lied,)), memory, cancel=cancel))
        await gave.wait()
        await until(lambda: memory.holds(2, CHAIN[2]), "three blocks are there")
        began = time.monotonic()
        await asyncio.to_thread(cancel.set)
        assert (await restoring).blocks == 3
        assert time.monotonic() - began < 2.0
        await b.index.flush()
        assert await a.claims() == {"a": 10}


async def test_a_stuck_peer_ends_at_the_deadline_and_is_left_alone(valkey: Valkey) -> None:
    """Its blocks until then count; the next request skips it."""
    async with engine(valkey.url, "b", memory_bytes=ROOM) as b, stuck_peer(CHAIN[:3]) as (stuck, _):
        location = Location({}, (PeerRun((stuck,), FORMAT, 0, 10),))
        memory = Memory(10)
        began = time.monotonic()
        assert (await b.restore(CHAIN, location, memory, block_seconds=0.02)).blocks == 3
        assert holds(memory, CHAIN, 3)
        assert 0.3 <= time.monotonic() - began < 4.0
        began = time.monotonic()
        assert (await b.restore(CHAIN, location, Memory(10))).blocks == 0
        assert time.monotonic() - began < 2.0


async def test_more_blocks_than_one_answer_has_are_restored(valkey: Valkey) -> None:
    """Several requests fetch them; blocks of another request are not counted as missing."""
    long = chain("a long prompt", 2_100)
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
    ):
        await a.keep(long)
        location = await b.finds(long, 2_100)
        memory = Memory(2_100)
        assert (await b.restore(long, location, memory)).blocks == 2_100
        assert memory.holds(2_099, long[2_099])
        await b.index.flush()
        assert await a.claims() == {"a": 2_100}


async def test_a_disk_from_before_the_start_is_announced(valkey: Valkey, tmp_path: Path) -> None:
    """After the first listing peers find the blocks that were on disk, though the index was empty."""
    long = chain("a long prompt", 1_500)
    async with engine(disk=tmp_path / "kv") as before:
        await before.keep(long)
    async with engine(valkey.url, "a", disk=tmp_path / "kv"), engine(valkey.url, "b", memory_bytes=ROOM) as b:
        await b.finds(long, 1_500)


async def test_two_who_notice_another_folder_announce_it_once(valkey: Valkey, tmp_path: Path) -> None:
    """The previous owner is no longer announced."""
    async with engine(valkey.url, "a", disk=tmp_path / "kv") as a:
        tier = a.store.tiers["disk"]
        assert isinstance(tier, DiskTier)
        first = tier.identity
        (tmp_path / "kv").rename(tmp_path / "gone")
        (tmp_path / "kv").mkdir()
        await until(lambda: tier.identity not in (None, first), "the other folder is seen")
        await asyncio.gather(a.owners.register_disk(tier), a.owners.register_disk(tier), a.keep(CHAIN))
        assert [owner.name for owner in a.index._owned] == [tier.identity]
        await a.index.next_heartbeat()
        assert (await a.claims()).get(str(tier.identity)) == 10


@pytest.mark.parametrize("trouble", ["frozen", "killed"])
async def test_an_index_that_is_away_costs_a_request_less_than_a_tenth_of_a_second(
    own_valkey: Valkey, tmp_path: Path, trouble: str
) -> None:
    """Blocks in this engine's tiers are found nevertheless."""
    async with engine(own_valkey.url, "a", memory_bytes=ROOM) as a:
        await a.keep(CHAIN)
        if trouble == "frozen":
            own_valkey.freeze()
        else:
            await own_valkey.kill()
        seconds = []
        for _ in range(7):
            began = time.monotonic()
            location = await a.store.locate(CHAIN)
            seconds.append(time.monotonic() - began)
            assert location == Location({"memory": 10})
        assert statistics.median(seconds) < 0.1
        assert max(seconds) < 2.0  # a busy machine's
        if trouble == "frozen":
            own_valkey.thaw()


async def test_a_frozen_index_does_not_hold_up_what_a_peer_gives(own_valkey: Valkey) -> None:
    """A restore does not wait for Redis."""
    async with (
        engine(own_valkey.url, "a", memory_bytes=ROOM) as a,
        engine(own_valkey.url, "b", memory_bytes=ROOM) as b,
    ):
        await a.keep(CHAIN)
        location = await b.finds(CHAIN, 10)
        own_valkey.freeze()
        try:
            began = time.monotonic()
            assert (await b.restore(CHAIN, location, Memory(10))).blocks == 10
            assert time.monotonic() - began < 0.9
        finally:
            own_valkey.thaw()


async def test_what_one_holder_does_not_give_the_next_one_does(valkey: Valkey) -> None:
    """A hanging holder uses its share of the deadline; another one sends the blocks."""
    async with (
        engine(valkey.url, "a", memory_bytes=ROOM) as a,
        engine(valkey.url, "b", memory_bytes=ROOM) as b,
        stuck_peer(CHAIN[:3]) as (stuck, _),
    ):
        await a.keep(CHAIN)
        (real,) = (await b.finds(CHAIN, 10)).peers[0].owners
        for owners in ((stuck, real), (real, stuck)):  # in either order
            memory = Memory(10)
            restored = await b.restore(CHAIN, Location({}, (PeerRun(owners, FORMAT, 0, 10),)), memory)
            assert restored.blocks == 10
            assert holds(memory, CHAIN, 10)
