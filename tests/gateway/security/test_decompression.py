"""Compressed bodies cannot make the gateway hold, or compute, more than their limit."""

import asyncio
import contextlib
import time
import zlib

import pytest

from gateway.http.memory_guard import resident_bytes
from gateway.upstreams.mock import MockUpstream
from tests.gateway.client import DEADLINE, Client
from tests.gateway.conftest import LIMIT
from tests.gateway.raw_upstream import chunked
from tests.gateway.wire import request_bytes, wire

MIB = 2**20
UNPACKED = 256 * MIB


def bomb(window: int) -> bytes:
    """A body that is a thousand times as long when it is unpacked."""
    packer = zlib.compressobj(9, wbits=window)
    block = b"a" * MIB
    return b"".join(packer.compress(block) for _ in range(UNPACKED // MIB)) + packer.flush()


GZIP, DEFLATE = bomb(31), bomb(15)


async def peak_while(task: "asyncio.Task[None]") -> int:
    """The most memory that the process has until the task ends."""
    peak = 0
    while not task.done():
        peak = max(peak, resident_bytes())
        await asyncio.sleep(0.001)
    await task
    return peak


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/audio/transcriptions", b"/v1/other", b"/nowhere"])
@pytest.mark.parametrize(("encoding", "body"), [(b"gzip", GZIP), (b"deflate", DEFLATE)], ids=["gzip", "deflate"])
async def test_a_body_is_unpacked_up_to_its_limit(
    served: tuple[Client, MockUpstream], path: bytes, encoding: bytes, body: bytes
) -> None:
    """Then it is refused and the connection ends: memory stays, and nothing more is unpacked."""
    client, mock = served
    assert len(body) < LIMIT

    async def attack() -> None:
        async with wire(client) as connection, asyncio.timeout(DEADLINE):
            await connection.send(request_bytes(body, b"Content-Encoding: " + encoding, path=path))
            assert (await connection.answer()).status in (404, 413)
            with contextlib.suppress(ConnectionError):  # what it had sent was not read
                assert await connection.reader.read() == b""

    before, cpu = resident_bytes(), time.process_time()
    peak = await peak_while(asyncio.create_task(attack()))
    assert peak - before < 32 * MIB
    assert time.process_time() - cpu < 1.0
    assert mock.received == []


async def test_a_body_in_chunks_is_unpacked_up_to_its_limit(served: tuple[Client, MockUpstream]) -> None:
    """Whatever its chunks are."""
    client, mock = served
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    before = resident_bytes()
    async with wire(client) as connection:
        pieces = [GZIP[start : start + 1000] for start in range(0, len(GZIP), 1000)]
        await connection.send(head + b"".join(map(chunked, pieces)) + chunked(b""))
        assert (await connection.answer()).status == 413
    assert resident_bytes() - before < 32 * MIB
    assert mock.received == []


@pytest.mark.parametrize("encoding", [b"compress", b"gzip, gzip", b"br", b"zstd", b"unknown"])
async def test_an_encoding_that_cannot_be_read_is_refused(served: tuple[Client, MockUpstream], encoding: bytes) -> None:
    """An upstream would get the body without the header that tells how to read it."""
    client, mock = served
    for path in (b"/v1/chat/completions", b"/v1/other"):
        async with wire(client) as connection:
            await connection.send(request_bytes(b"{}", b"Content-Encoding: " + encoding, path=path))
            assert (await connection.answer()).status in (400, 415)
    assert mock.received == []
