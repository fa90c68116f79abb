"""Bytes that are not HTTP: a 4xx in OpenAI's error form, a running worker, and no log."""

import contextlib
import logging
from typing import Any

import msgspec
import pytest

from gateway.upstreams.mock import MockUpstream
from tests.gateway.client import Client
from tests.gateway.conftest import SECRET, Stage
from tests.gateway.raw_upstream import chunked
from tests.gateway.wire import request_bytes, wire

MESSAGES: list[Any] = [{"role": "user", "content": SECRET}]

pytestmark = pytest.mark.usefixtures("secret_is_not_logged")


def body() -> bytes:
    return msgspec.json.encode({"model": "mock", "messages": MESSAGES})


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n"
NOT_HTTP: dict[str, bytes] = {
    "no HTTP at all": SECRET.encode() + b"\r\n\r\n",
    "no version": b"POST /v1/chat/completions " + SECRET.encode() + b"\r\n\r\n",
    "a wrong version": b"GET /health HTTP/9.9\r\nX: " + SECRET.encode() + b"\r\n\r\n",
    "a method with odd characters": b"P(ST /" + SECRET.encode() + b" HTTP/1.1\r\n\r\n",
    "a path with a control character": b"GET /\x00" + SECRET.encode() + b" HTTP/1.1\r\nHost: g\r\n\r\n",
    "a header without a colon": HEAD + SECRET.encode() + b"\r\n\r\n",
    "a header with a space in its name": HEAD + b"X " + SECRET.encode() + b": 1\r\n\r\n",
    "a header with a line folded": HEAD + b"X: 1\r\n " + SECRET.encode() + b"\r\n\r\n",
    "a header with a lone return": HEAD + b"Authorization: a\rX-Injected: " + SECRET.encode() + b"\r\n\r\n",
    "a header with a zero byte": HEAD + b"Authorization: " + SECRET.encode() + b"\x00\r\n\r\n",
    "a gigantic header": HEAD + b"X: " + SECRET.encode() * 10_000 + b"\r\n\r\n",
    "a gigantic path": b"GET /" + SECRET.encode() * 10_000 + b" HTTP/1.1\r\nHost: g\r\n\r\n",
    "too many headers": HEAD + b"".join(b"X-%d: %s\r\n" % (n, SECRET.encode()) for n in range(60_000)) + b"\r\n",
    "a length that is none": HEAD + b"Content-Length: " + SECRET.encode() + b"\r\n\r\n",
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + body(),
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + body(),
    "a length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n" + chunked(body()),
    "an unknown coding": HEAD + b"Transfer-Encoding: " + SECRET.encode() + b"\r\n\r\n",
    "a chunk without a size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + SECRET.encode() + b"\r\n",
    "a chunk longer than its size": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n3\r\n"
    + SECRET.encode()
    + b"\r\n0\r\n\r\n",
    "an unknown expectation": HEAD + b"Connection: close\r\nExpect: " + SECRET.encode() + b"\r\n\r\n",
    "an unknown method": b"BREW /" + SECRET.encode() + b" HTTP/1.1\r\nHost: g\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET.encode() + b"\r\n\r\n",
}


@pytest.mark.parametrize("bad", NOT_HTTP.values(), ids=NOT_HTTP.keys())
async def test_bytes_that_are_not_http_are_refused_in_openais_form(
    served: tuple[Client, MockUpstream], bad: bytes
) -> None:
    """Bytes that are not HTTP give a 4xx with OpenAI's error object."""
    client, mock = served
    async with wire(client) as connection:
        with contextlib.suppress(ConnectionError):  # refused before all was sent
            await connection.send(bad)
        refused = await connection.answer()

    assert 400 <= refused.status < 500
    assert refused.error["type"] == "invalid_request_error"
    assert SECRET not in refused.headers
    assert SECRET not in refused.error["message"]
    assert mock.received == []


@pytest.mark.parametrize("bad", NOT_HTTP.values(), ids=NOT_HTTP.keys())
async def test_bytes_that_are_not_http_are_refused_after_hits_too(
    served: tuple[Client, MockUpstream], bad: bytes
) -> None:
    """Bytes that are not HTTP are refused in the same way on a connection that had hits."""
    client, mock = served
    async with wire(client) as connection:
        for _ in range(5):
            await connection.send(request_bytes(body()))
            assert (await connection.answer()).status == 200
        with contextlib.suppress(ConnectionError):  # refused before all was sent
            await connection.send(bad)
        refused = await connection.answer()

    assert 400 <= refused.status < 500
    assert len(mock.received) == 1


@pytest.mark.parametrize("bad", [b"no size", b"3\r\nlonger than that\r\n0\r\n\r\n"], ids=["no size", "too long"])
async def test_a_body_that_turns_bad_later_is_refused_at_once(stage: Stage, bad: bytes) -> None:
    """A chunked body that becomes invalid is refused before its deadline."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with wire(client) as connection:
        await connection.send(HEAD + b"Expect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b"100" in await connection.line()  # it waits for the body now
        await connection.line()
        with contextlib.suppress(ConnectionError):
            await connection.send(bad + b"\r\n")
        refused = await connection.answer()

    assert refused.status == 400
    assert mock.received == []


async def test_a_body_that_cannot_be_unpacked_is_400(
    served: tuple[Client, MockUpstream], caplog: pytest.LogCaptureFixture
) -> None:
    """A body that cannot be unpacked gives 400 without a warning in the log."""
    client, _ = served
    with caplog.at_level(logging.INFO):
        answer = await client.post(b"not gzip, " + SECRET.encode(), Content_Encoding="gzip")

    assert answer.status == 400
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
