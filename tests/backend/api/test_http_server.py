"""Requests that are not valid HTTP get OpenAI's error form, and none of their bytes reach the log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging

import pytest

from tests.backend.conftest import COMPLETIONS, MODEL, Served, StartServer

PROMPT = "1, 2, 3, 4,"
SECRET = b"swordfish"
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

UNREADABLE: list[tuple[str, bytes]] = [
    ("no HTTP at all", SECRET + b"\r\n\r\n"),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + SECRET),
    ("a header without a colon", HEAD + SECRET + b"\r\n\r\n"),
    ("an endless line", b"GET /" + SECRET + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n"),
    ("an endless header", HEAD + b"X: " + SECRET + b"x" * 70_000 + b"\r\n\r\n"),
    ("too many headers", HEAD + b"".join(b"X%d: %s\r\n" % (i, SECRET) for i in range(500)) + b"\r\n"),
    ("two lengths", HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n" + SECRET),
    ("a length that is no number", HEAD + b"Content-Length: " + SECRET + b"\r\n\r\n"),
    ("a chunk size that is none", CHUNKED + SECRET + b"\r\n"),
    ("a second chunk size that is none", CHUNKED + b"1\r\n{\r\n" + SECRET + b"\r\n"),
    ("garbage said to be gzip", HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9\r\n\r\n" + SECRET),
    ("garbage said to be deflate", HEAD + b"Content-Encoding: deflate\r\nContent-Length: 9\r\n\r\n" + SECRET),
    (
        "garbage said to be gzip, in chunks",
        CHUNKED[:-2] + b"Content-Encoding: gzip\r\n\r\n9\r\n" + SECRET + b"\r\n0\r\n\r\n",
    ),
    ("an unknown compression", HEAD + b"Content-Encoding: br\r\nContent-Length: 9\r\n\r\n" + SECRET),
    ("an unknown expectation", HEAD + b"Connection: close\r\nExpect: " + SECRET + b"\r\n\r\n"),
]


async def exchange(served: Served, *pieces: bytes, end: bool = False) -> bytes:
    """All bytes that a connection answers, until the server closes it."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            # A request on another connection: the server has read what was written before it.
            async with served.client.get("/health") as response:
                assert response.status == 200
        if end:
            writer.write_eof()
        async with asyncio.timeout(10):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(("name", "sent"), UNREADABLE, ids=[name for name, _ in UNREADABLE])
async def test_an_unreadable_request_is_a_400_that_quotes_nothing(
    server: Served, name: str, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """An unreadable request is one 400 that closes the connection, and none of its bytes are quoted or logged."""
    caplog.set_level(logging.DEBUG)
    # Whole, and as a body that comes when its head has been read already.
    split = sent.find(b"\r\n\r\n") + 4
    for pieces in [(sent,)] + ([(sent[:split], sent[split:])] if 4 <= split < len(sent) else []):
        answer = await exchange(server, *pieces)
        assert_refused(answer)
        assert SECRET not in answer
    assert SECRET.decode() not in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert await server.text(PROMPT, max_tokens=1)


def assert_refused(answer: bytes) -> None:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.1 400 ", b"HTTP/1.0 400 ")), answer
    assert b"content-type: application/json" in head.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("framing", [b"Content-Length: 100\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n64\r\n{"])
async def test_a_body_that_breaks_off_is_neither_logged_nor_kept(
    server: Served, framing: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A body whose sender disconnects is neither logged nor kept in flight."""
    caplog.set_level(logging.INFO)
    await exchange(server, HEAD + framing, end=True)
    assert await server.text(PROMPT, max_tokens=1)
    assert not caplog.records
    assert server.state.engine.in_flight == 0


async def test_a_compressed_body_is_read(server: Served) -> None:
    """A gzip body is decompressed and answered."""
    body = gzip.compress(json.dumps({"model": MODEL, "prompt": PROMPT, "max_tokens": 1}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with server.client.post(COMPLETIONS, data=body, headers=headers) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("sent", [b"", HEAD])
async def test_a_connection_without_a_whole_head_is_closed(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """A connection that sends no whole request head in time is closed."""
    monkeypatch.setattr("backend.api.http_server.IDLE_CONNECTION_SECONDS", 0.1)
    served = await start_server()
    assert await exchange(served, sent) == b""
