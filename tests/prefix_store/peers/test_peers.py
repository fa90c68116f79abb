"""Blocks from other engines: valid ones are restored, every fault is a miss."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.frames.block_id import BlockId
from prefix_store.frames.frame import HEADER_BYTES, FrameHeader
from prefix_store.frames.segments import Bytes
from prefix_store.peers.client import PeerClient
from prefix_store.peers.exchange import Address
from prefix_store.peers.protocol import EPOCH_HEADER, FRAMES_TYPE, PATH, BlocksRequest
from prefix_store.peers.server import BlockServer
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.counts import Progress
from prefix_store.tiers.disk.disk_tier import DiskTier
from tests.prefix_store.peers.world import EPOCH, SECRET, impostor, listening, serving
from tests.prefix_store.tiers.blocks import Memory, chain, format_of
from tests.prefix_store.tiers.waiting import until

FORMAT = format_of()
CHAIN = chain("a prompt", 6)
WITHIN = 0.6
"""Seconds."""


@pytest.fixture
async def client() -> AsyncIterator[PeerClient]:
    asking = PeerClient(SECRET)
    yield asking
    await asking.close()


def frame_of(block: BlockId, content_of: BlockId | None = None) -> Bytes:
    memory = Memory(1)
    frame = np.empty(FORMAT.frame_bytes, np.uint8)
    FORMAT.seal(block, memory.fill([content_of or block])[0], frame)
    return frame


def lie_about(said: Any) -> Any:
    match said:
        case bytes():
            return b"x" * len(said)
        case tuple():
            return (*said[:-1], said[-1] + 1)
        case _:
            return said + 1


async def answered(request: web.Request, body: bytes, epoch: str = EPOCH, kind: str = FRAMES_TYPE) -> web.Response:
    await request.read()
    return web.Response(body=body, headers={EPOCH_HEADER: epoch, "content-type": kind})


async def test_what_a_peer_has_is_restored(client: PeerClient) -> None:
    """All blocks of a chain are restored, over one connection that is reused."""
    memory = Memory(6)
    async with serving(CHAIN) as (peer, _, server):
        assert await client.read(peer, CHAIN[:2], memory.all(2), FORMAT) == 2
        assert await client.read(peer, CHAIN[2:], memory.all(6)[2:], FORMAT) == 4
        assert all(memory.holds(number, block) for number, block in enumerate(CHAIN))
        assert server.frames == 6
        assert client.counts.hits == 6
        assert client.counts.bytes_read == 6 * FORMAT.frame_bytes


async def test_blocks_end_where_the_peer_has_no_more(client: PeerClient) -> None:
    """The leading blocks are restored, the other memory is unchanged, and the peer is not skipped."""
    memory = Memory(6)
    async with serving(CHAIN[:4]) as (peer, _, _server):
        assert await client.read(peer, CHAIN, memory.all(6), FORMAT) == 4
        assert memory.holds(3, CHAIN[3])
        assert memory.is_untouched(4)
        assert client.may_ask(peer)
        assert await client.read(peer, CHAIN, memory.all(6), FORMAT) == 4


async def test_a_disk_serves_as_memory_does(client: PeerClient, tmp_path: Path) -> None:
    """A frame on disk is verified, and not sent if it is damaged."""
    tier = DiskTier(tmp_path / "kv", FORMAT, 100 * FORMAT.frame_bytes, LeastRecentlyUsed)
    memory = Memory(6)
    assert await tier.write(CHAIN, memory.fill(CHAIN), Access(0.0)) == 6
    file = next((tmp_path / "kv" / "blocks").glob(f"*/{CHAIN[3].key.hex()}-*"))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    server = BlockServer([tier], SECRET, EPOCH)
    async with listening(*server.routes()) as url:
        restored = Memory(6)
        assert await client.read(Address(url, EPOCH), CHAIN, restored.all(6), FORMAT) == 3
        assert client.may_ask(Address(url, EPOCH))
    assert tier.counts.bad_frames == {"checksum": 1}
    assert not file.exists()
    await tier.close()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(FrameHeader)])
async def test_a_peer_that_lies_in_one_field_is_found_out(client: PeerClient, field: str) -> None:
    """A wrong field with a valid header checksum is detected; nothing of the frame is copied."""
    true = FrameHeader.unpack(frame_of(CHAIN[1])[:HEADER_BYTES].data)
    header = dataclasses.replace(true, **{field: lie_about(getattr(true, field))})

    async def handler(request: web.Request) -> web.Response:
        body = frame_of(CHAIN[0]).tobytes() + header.pack() + frame_of(CHAIN[1])[HEADER_BYTES:].tobytes()
        return await answered(request, body)

    memory = Memory(2)
    async with impostor(handler) as peer:
        assert await client.read(peer, CHAIN[:2], memory.all(2), FORMAT) == 1
        assert memory.holds(0, CHAIN[0])
        assert memory.is_untouched(1)
        assert client.counts.bad_frames == {field.replace("_", " "): 1}
        assert not client.may_ask(peer)
        assert await client.read(peer, CHAIN[:1], memory.all(1), FORMAT) == 0


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(frame_of(CHAIN[0], content_of=CHAIN[1])[:-1].tobytes(), id="cut"),
        pytest.param(frame_of(CHAIN[1]).tobytes(), id="another-block"),
        pytest.param(b"<html>It works!</html>", id="no-frame"),
        pytest.param(bytes(FORMAT.frame_bytes), id="zeros"),
        pytest.param(frame_of(CHAIN[0]).tobytes() + b"more", id="more-than-asked"),
    ],
)
async def test_an_answer_that_is_not_the_frames_is_no_answer(client: PeerClient, body: bytes) -> None:
    """Its peer is skipped."""

    async def handler(request: web.Request) -> web.Response:
        return await answered(request, body)

    memory = Memory(1)
    async with impostor(handler) as peer:
        restored = await client.read(peer, CHAIN[:1], memory.all(1), FORMAT)
        assert restored == (1 if body.endswith(b"more") else 0)
        assert memory.holds(0, CHAIN[0]) if restored else memory.is_untouched(0)
        assert client.counts.io_errors == {"PeerInvalid": 1}
        assert not client.may_ask(peer)


@pytest.mark.parametrize("status", [401, 404, 500, 503])
async def test_a_peer_that_refuses_is_left_alone_for_a_moment(client: PeerClient, status: int) -> None:
    """Its answer is not read as frames."""

    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, body=frame_of(CHAIN[0]).tobytes(), headers={EPOCH_HEADER: EPOCH})

    memory = Memory(1)
    async with impostor(handler) as peer:
        assert await client.read(peer, CHAIN[:1], memory.all(1), FORMAT) == 0
    assert memory.is_untouched(0)
    assert client.counts.io_errors == {"PeerRefused": 1}


async def test_a_peer_that_restarted_is_not_the_one_that_was_meant(client: PeerClient) -> None:
    """The old epoch is skipped for good; the new one is another peer."""
    memory = Memory(6)
    async with serving(CHAIN, epoch="epoch 8") as (peer, _, server):
        old = Address(peer.url, "epoch 7")
        assert await client.read(old, CHAIN, memory.all(6), FORMAT) == 0
        assert client.counts.io_errors == {"PeerRestarted": 1}
        assert server.answers == {409: 1}
        assert not client.may_ask(old)
        assert await client.read(peer, CHAIN, memory.all(6), FORMAT) == 6


async def test_an_answer_of_another_epoch_is_not_read(client: PeerClient) -> None:
    """An answer with another epoch is refused."""

    async def handler(request: web.Request) -> web.Response:
        return await answered(request, frame_of(CHAIN[0]).tobytes(), epoch="epoch 8")

    memory = Memory(1)
    async with impostor(handler) as peer:
        assert await client.read(peer, CHAIN[:1], memory.all(1), FORMAT) == 0
    assert memory.is_untouched(0)
    assert client.counts.io_errors == {"PeerRestarted": 1}


async def test_a_dead_peer_costs_a_refused_connection(client: PeerClient) -> None:
    """Then it is skipped."""
    async with serving(CHAIN) as (peer, _, _server):
        pass
    memory = Memory(1)
    assert await client.read(peer, CHAIN[:1], memory.all(1), FORMAT) == 0
    assert not client.may_ask(peer)
    assert client.counts.io_errors == {"PeerFailed": 1}


async def test_a_connection_that_the_peer_has_closed_is_made_anew(client: PeerClient) -> None:
    """A peer that closes idle connections is not skipped."""
    memory = Memory(6)
    ends: list[Callable[[], None]] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        ends.append(request.transport.abort)
        return await answered(request, frame_of(CHAIN[0]).tobytes())

    async with impostor(handler) as peer:
        assert await client.read(peer, CHAIN[:1], memory.all(1), FORMAT) == 1
        ends.pop()()
        assert await client.read(peer, CHAIN[:1], memory.all(1), FORMAT) == 1
    assert not client.counts.io_errors


async def test_a_silent_peer_costs_the_deadline_of_the_first_byte(client: PeerClient) -> None:
    """It does not wait for the deadline of the whole answer."""
    silence = asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        await silence.wait()
        return web.Response()

    memory = Memory(1)
    async with impostor(handler) as peer:
        began = time.monotonic()
        assert await client.read(peer, CHAIN[:1], memory.all(1), FORMAT) == 0
        assert time.monotonic() - began < 2
        silence.set()


async def test_a_dripping_peer_costs_the_whole_deadline_and_no_more(client: PeerClient) -> None:
    """Blocks that came in time count, and the thread is free again."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={EPOCH_HEADER: EPOCH, "content-type": FRAMES_TYPE})
        await response.prepare(request)
        await response.write(frame_of(CHAIN[0]).tobytes())
        for byte in frame_of(CHAIN[1]).tobytes():
            await response.write(bytes([byte]))
            await asyncio.sleep(0.05)
        return response

    memory = Memory(2)
    async with impostor(handler) as peer:
        began = time.monotonic()
        assert await client.read(peer, CHAIN[:2], memory.all(2), FORMAT, WITHIN) == 1
        assert time.monotonic() - began < WITHIN + 0.5
        await asyncio.wait_for(client.close(), 2)
    assert memory.holds(0, CHAIN[0])
    assert memory.is_untouched(1)


async def test_who_gives_up_has_its_memory_back(client: PeerClient) -> None:
    """A cancelled read writes nothing afterwards."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        asked.set()
        await go_on.wait()
        return await answered(request, frame_of(CHAIN[0]).tobytes())

    memory = Memory(1)
    async with impostor(handler) as peer:
        reading = asyncio.create_task(client.read(peer, CHAIN[:1], memory.all(1), FORMAT))
        await asked.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        go_on.set()
    await client.close()
    assert memory.is_untouched(0)


async def test_who_takes_its_memory_back_ends_the_read(client: PeerClient) -> None:
    """Earlier blocks count, later ones are not copied, and the peer is not skipped; in any thread."""
    sent, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={EPOCH_HEADER: EPOCH, "content-type": FRAMES_TYPE})
        await response.prepare(request)
        await response.write(frame_of(CHAIN[0]).tobytes())
        sent.set()
        await go_on.wait()
        with contextlib.suppress(ConnectionError):
            await response.write(frame_of(CHAIN[1]).tobytes())
        return response

    memory, cancel = Memory(2), CancelToken()
    async with impostor(handler) as peer:
        reading = asyncio.create_task(client.read(peer, CHAIN[:2], memory.all(2), FORMAT, cancel=cancel))
        await sent.wait()
        await until(lambda: memory.holds(0, CHAIN[0]), "the first block is copied")
        await asyncio.to_thread(cancel.set)
        assert await reading == 1
        go_on.set()
        await client.close()
        assert memory.is_untouched(1)
        assert client.may_ask(peer)
        assert not client.counts.io_errors


async def test_what_is_taken_back_at_once_is_not_asked_for(client: PeerClient) -> None:
    """No request is sent, and nothing is copied."""
    memory, cancel = Memory(6), CancelToken()
    cancel.set()
    async with serving(CHAIN) as (peer, _, server):
        assert await client.read(peer, CHAIN, memory.all(6), FORMAT, cancel=cancel) == 0
        assert server.frames == 0
    assert memory.is_untouched(0)


async def test_what_arrives_too_late_is_not_copied(client: PeerClient) -> None:
    """Not even if the connection could not be interrupted."""

    class Deaf(CancelToken):
        def set_interrupt(self, interrupt: Callable[[], None] | None) -> None:
            pass

    cancel, memory = Deaf(), Memory(6)
    cancel.set()
    async with serving(CHAIN) as (peer, _, _server):
        with pytest.raises(Cancelled):
            await asyncio.to_thread(client._fetch, peer, CHAIN, memory.all(6), FORMAT, Progress(), cancel)
    assert memory.is_untouched(0)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "127.0.0.1:80", "http://[", "http://127.0.0.1:0x"])
async def test_an_address_that_is_none_is_a_dead_peer(client: PeerClient, url: str) -> None:
    """Engines report their own addresses: an invalid one must do no harm."""
    assert await client.read(Address(url, EPOCH), CHAIN[:1], Memory(1).all(1), FORMAT) == 0
    assert client.counts.io_errors == {"PeerFailed": 1}


def requested(epoch: str = EPOCH, blocks: list[tuple[bytes, bytes]] | None = None) -> bytes:
    names = [(block.key, block.parent) for block in CHAIN] if blocks is None else blocks
    return msgspec.msgpack.encode(BlocksRequest(epoch, names))


@pytest.mark.parametrize(
    ("authorization", "body", "status"),
    [
        (None, requested(), 401),
        ("Bearer ", requested(), 401),
        (f"Bearer {SECRET}x", requested(), 401),
        (f"Bearer {SECRET[:-1]}", requested(), 401),
        (f"Basic {SECRET}", requested(), 401),
        ("Bearer schlüssel", requested(), 401),
        (f"Bearer {SECRET}", b"", 400),
        (f"Bearer {SECRET}", b"{}", 400),
        (f"Bearer {SECRET}", requested(blocks=[]), 400),
        (f"Bearer {SECRET}", requested(blocks=[(b"short", b"p" * 16)]), 400),
        (f"Bearer {SECRET}", b"x" * 200_000, 413),
        (f"Bearer {SECRET}", requested(epoch="epoch 6"), 409),
        (f"Bearer {SECRET}", requested(), 200),
    ],
)
async def test_blocks_are_for_those_who_know_the_secret_and_ask_well(
    authorization: str | None, body: bytes, status: int
) -> None:
    """Other clients get no information about stored blocks."""
    headers = {} if authorization is None else {"authorization": authorization}
    async with serving(CHAIN) as (peer, _, server), aiohttp.ClientSession() as session:
        async with session.post(peer.url + PATH, data=body, headers=headers) as response:
            answer = await response.read()
            assert response.status == status
        assert len(answer) == 6 * FORMAT.frame_bytes if status == 200 else len(answer) < 300
        assert server.answers == {status: 1}


async def test_a_key_without_its_parent_opens_nothing() -> None:
    """A block needs both of its hashes; a missing block ends the answer."""
    wrong = [(CHAIN[0].key, b"x" * 16)]
    async with serving(CHAIN) as (peer, tier, _), aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {SECRET}"}
        async with session.post(peer.url + PATH, data=requested(blocks=wrong), headers=headers) as response:
            assert (response.status, await response.read()) == (200, b"")
        assert not tier.counts.bad_frames


async def test_beyond_a_few_answers_at_a_time_nobody_waits() -> None:
    """Further requests are refused at once."""
    release = asyncio.Event()
    waiting = asyncio.Semaphore(0)

    class Slow:
        async def frame(self, key: bytes, parent: bytes) -> bytes | None:
            waiting.release()
            await release.wait()
            return None

    server = BlockServer([Slow()], SECRET, EPOCH)
    async with listening(*server.routes()) as url, aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {SECRET}"}

        async def ask() -> int:
            async with session.post(url + PATH, data=requested(), headers=headers) as response:
                return response.status

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        for _ in range(4):
            await waiting.acquire()
        assert await ask() == 503
        release.set()
        assert [await task for task in asking] == [200] * 4


def test_without_a_secret_nothing_is_served_or_asked() -> None:
    """An empty secret raises ValueError."""
    with pytest.raises(ValueError, match="without a secret no blocks are served"):
        BlockServer([], "", EPOCH)
    with pytest.raises(ValueError, match="the secret of the peers is empty"):
        PeerClient("")


async def test_who_goes_away_in_the_midst_of_a_question_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """An aborted request or a killed engine is not logged with a traceback."""
    async with serving(chain("a prompt", 6)) as (address, _, server):
        host, _, port = address.url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {SECRET}\r\ncontent-length: 100\r\n"
        writer.write(head.encode() + b"\r\nab")
        await writer.drain()
        await asyncio.sleep(0.1)  # it has begun to read the body
        writer.transport.abort()
        await until(lambda: server.answers[400] > 0 or bool(caplog.records), "the server has noticed")
    assert caplog.records == []
