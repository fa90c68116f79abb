"""Bytes that two servers could read as different requests: refused, or exactly one request at the upstream."""

import asyncio
import contextlib

import msgspec
import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import CHAT, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, RawUpstream, chunked, json_reply
from tests.gateway.wire import request_bytes, wire

REPLY = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    }
)
BODY = msgspec.json.encode(chat("hello"))
CHUNKS = chunked(BODY) + chunked(b"")
INJECTED = b"X-Injected: 1"


def post(body: bytes, *headers: bytes, line: bytes = b"POST /v1/chat/completions HTTP/1.1") -> bytes:
    """A request as bytes, without a length."""
    return b"\r\n".join((line, b"Host: gateway", *headers, b"", body))


def with_length(*headers: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    return request_bytes(BODY, *headers, path=path)


def line(method: bytes, target: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    """A request with another first line."""
    length = b"Content-Length: %d" % len(BODY)
    return post(BODY, length, line=b" ".join((method, target, version)))


TE = b"Transfer-Encoding: chunked"
REFUSED: dict[str, bytes] = {
    "a length, then chunks": post(CHUNKS, b"Content-Length: 3", TE),
    "chunks, then a length": post(CHUNKS, TE, b"Content-Length: 3"),
    "two lengths that differ": with_length(b"Content-Length: 3"),
    "two equal lengths": with_length(b"Content-Length: %d" % len(BODY)),
    "a list of lengths": post(BODY, b"Content-Length: %d, %d" % (len(BODY), len(BODY))),
    "a length with a sign": post(BODY, b"Content-Length: +%d" % len(BODY)),
    "a length in hexadecimal": post(BODY, b"Content-Length: 0x10"),
    "a length with an underscore": post(BODY, b"Content-Length: 1_0"),
    "a folded coding": post(CHUNKS, b"Transfer-Encoding:\r\n chunked"),
    "a coding in a folded line": post(CHUNKS, b"X: a\r\n " + TE),
    "a coding after a blank": post(CHUNKS, b" " + TE),
    "a coding with a blank before its colon": post(CHUNKS, b"Transfer-Encoding : chunked", b"Content-Length: 3"),
    "an unknown coding": post(CHUNKS, b"Transfer-Encoding: xchunked"),
    "a quoted coding": post(CHUNKS, b'Transfer-Encoding: "chunked"'),
    "a coding after a vertical tab": post(CHUNKS, b"Transfer-Encoding: \x0bchunked"),
    "identity": post(BODY, b"Transfer-Encoding: identity", b"Content-Length: %d" % len(BODY)),
    "identity before chunked": post(CHUNKS, b"Transfer-Encoding: identity, chunked"),
    "gzip before chunked": post(CHUNKS, b"Transfer-Encoding: gzip, chunked"),
    "chunked before identity": post(CHUNKS, b"Transfer-Encoding: chunked, identity"),
    "chunked twice": post(CHUNKS, TE, TE),
    "chunked in HTTP/1.0": post(CHUNKS, TE, line=b"POST /v1/chat/completions HTTP/1.0"),
    "a line feed alone after headers": with_length().replace(b"\r\n", b"\n"),
    "a line feed within a header": with_length(b"X-A: b\n" + INJECTED),
    "a return within a header": with_length(b"X-A: b\r" + INJECTED),
    "a zero byte in a value": with_length(b"X-A: b\0c"),
    "a control character in a value": with_length(b"X-A: b\x01c"),
    "a zero byte in a name": with_length(b"X\0A: b"),
    "a blank before a colon": with_length(b"X-A : b"),
    "two hosts": with_length(b"Host: other"),
    "no host": with_length().replace(b"Host: gateway\r\n", b""),
    "an extension of a chunk with a line feed": post(b"%x;a\nb\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), TE),
    "chunks that end in a line feed": post(b"%x\n%s\n0\n\n" % (len(BODY), BODY), TE),
    "a chunk with a prefix": post(b"0x%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), TE),
    "a negative chunk": post(b"-%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), TE),
    "a chunk beyond 64 bits": post(b"f" * 17 + b"\r\n" + BODY + b"\r\n0\r\n\r\n", TE),
    "a chunk that goes on": post(b"%x\r\n%sXX0\r\n\r\n" % (len(BODY), BODY), TE),
    "a trailer with a length": post(b"%x\r\n%s\r\n0\r\nContent-Length: 5\r\n\r\n" % (len(BODY), BODY), TE),
    "a target at another host": line(b"POST", b"http://other.example/v1/chat/completions"),
    "a target without a slash": line(b"POST", b"@other.example/v1/chat/completions"),
    "CONNECT": line(b"CONNECT", b"other.example:80"),
    "TRACE": line(b"TRACE", b"/v1/other"),
    "a method of WebDAV": line(b"PROPFIND", b"/v1/other"),
    "two slashes": line(b"POST", b"//other.example/v1/chat/completions"),
    "a space in the path": line(b"POST", b"/v1/other x"),
    "a tab in the path": line(b"POST", b"/v1/other\tx"),
    "a backslash in the path": line(b"POST", b"/v1/..\\admin"),
    "an escaped backslash in the path": line(b"POST", b"/v1/..%5cadmin"),
    "dots in the path": line(b"POST", b"/v1/../admin"),
    "escaped dots in the path": line(b"POST", b"/v1/%2e%2e/admin"),
    "dots with an escaped slash": line(b"POST", b"/v1/..%2fadmin"),
    "dots escaped twice": line(b"POST", b"/v1/%252e%252e/admin"),
    "dots with a parameter": line(b"POST", b"/v1/..;/admin"),
    "escaped line breaks in the path": line(b"POST", b"/v1/other%0d%0a" + INJECTED.replace(b" ", b"%20")),
    "an escaped zero byte in the path": line(b"POST", b"/v1/other%00"),
    "HTTP/0.9": b"GET /v1/models\r\n\r\n",
    "HTTP/2.0": line(b"POST", b"/v1/chat/completions", b"HTTP/2.0"),
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a gigantic header": with_length(b"X-A: " + b"a" * 100_000),
    "thousands of headers": with_length(*(b"X-%d: a" % number for number in range(5_000))),
    "an unknown expectation": with_length(b"Expect: 200-ok"),
}
PASSED: dict[str, bytes] = {
    "chunks": post(CHUNKS, TE),
    "a coding in upper case": post(CHUNKS, b"Transfer-Encoding: CHUNKED"),
    "a coding after a tab": post(CHUNKS, b"Transfer-Encoding:\tchunked"),
    "an extension of a chunk": post(b"%x;a=b\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), TE),
    "blank lines first": b"\r\n\r\n" + with_length(),
    "a target in the absolute form": line(b"POST", b"http://gateway/v1/chat/completions"),
    "escaped line breaks in the query": with_length(path=b"/v1/chat/completions?a=%0d%0aX-Injected:%201"),
    "escaped line breaks in a header": with_length(b"X-A: a%0d%0aX-Injected: 1"),
    "bytes that are not ASCII in a header": with_length(b"X-A: \xe4\xff"),
    "Upgrade to a WebSocket": with_length(b"Connection: Upgrade", b"Upgrade: websocket", b"Sec-WebSocket-Key: x"),
    "Upgrade to HTTP/2": with_length(b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AA"),
    "headers for one hop": with_length(b"Connection: close, X-Hop", b"X-Hop: 1", b"Keep-Alive: 5", b"TE: trailers"),
    "a namespace": with_length(b"X-Keepgate-Namespace: other", b"X-Keepgate-Admin-Key: guess"),
}
NEVER_SENT = (b"x-injected: 1", b"upgrade", b"http2-settings", b"x-hop", b"keep-alive", b"te:", b"transfer-encoding")
NEVER_SENT_NAMES = (b"x-keepgate-namespace", b"x-keepgate-admin-key", b"connection:")


async def answering(connection: Connection) -> None:
    await connection.send(json_reply(REPLY))


@pytest.fixture
async def attacked(stage: Stage) -> tuple[Client, RawUpstream]:
    upstream = await stage.raw(answering)
    return await stage.gateway(upstream), upstream


async def statuses(client: Client, data: bytes, answers: int) -> list[int]:
    """The statuses of so many answers, or of those before the gateway closes the connection."""
    got: list[int] = []
    async with wire(client) as connection:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await connection.send(data)
            for _ in range(answers):
                got += [(await connection.answer()).status]
    return got


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
async def test_an_ambiguous_request_reaches_no_upstream(attacked: tuple[Client, RawUpstream], data: bytes) -> None:
    """It gets a 4xx, or 505 for a version, and the upstream gets nothing."""
    client, upstream = attacked
    got = await statuses(client, data, 1)
    assert len(got) == 1
    assert 400 <= got[0] < 500 or got[0] == 505
    assert upstream.connections == []


@pytest.mark.parametrize("data", PASSED.values(), ids=PASSED.keys())
async def test_an_unusual_request_is_one_request_at_the_upstream(
    attacked: tuple[Client, RawUpstream], data: bytes
) -> None:
    """With a length of its own, no header of this hop and none that a value contained."""
    client, upstream = attacked
    assert await statuses(client, data, 1) == [200]
    [sent] = upstream.connections
    first, *headers = sent.head.lower().split(b"\r\n")
    assert first.startswith(b"post /v1/chat/completions")
    assert sent.body == BODY
    assert [header for header in headers if header.startswith((*NEVER_SENT, *NEVER_SENT_NAMES))] == []
    assert [header for header in headers if header.startswith(b"content-length")] == [b"content-length: %d" % len(BODY)]


async def test_requests_after_one_another_are_two_requests_at_the_upstream(
    attacked: tuple[Client, RawUpstream],
) -> None:
    """Pipelined requests are sent on each on a connection, or one after the other."""
    client, upstream = attacked
    second = request_bytes(msgspec.json.encode(chat("second")))
    assert await statuses(client, with_length() + second, 2) == [200, 200]
    assert [msgspec.json.decode(sent.body)["messages"][0]["content"] for sent in upstream.connections] == [
        "hello",
        "second",
    ]


async def test_nothing_after_a_refused_request_is_read(attacked: tuple[Client, RawUpstream]) -> None:
    """The connection ends with the refusal: what follows may be part of the body for another reader."""
    client, upstream = attacked
    smuggled = line(b"POST", b"/v1/other")
    assert await statuses(client, line(b"TRACE", b"/v1/other") + smuggled, 2) == [405]
    assert upstream.connections == []


async def test_what_an_upstream_smuggles_into_its_answer_ends_there(stage: Stage) -> None:
    """Bytes after an answer are no answer to the next request."""
    mock = await stage.mock(Reply(text="right"))

    async def converse(connection: Connection) -> None:
        await connection.send(json_reply(REPLY).replace(b"Connection: close\r\n", b"") + json_reply(b'{"wrong":1}'))

    client = await stage.gateway(await stage.raw(converse), mock)
    for number in range(4):
        assert (await client.post(chat(f"question {number}"))).text in ("ok", "right")


async def test_a_refusal_is_counted(served: tuple[Client, MockUpstream]) -> None:
    """As an error of its own code."""
    client, _ = served
    before = await client.figure("errors_total", code="ambiguous_request")
    assert await statuses(client, line(b"POST", b"/v1/..%5cadmin"), 1) == [400]
    assert await client.figure("errors_total", code="ambiguous_request") == before + 1
    assert (await client.send("POST", CHAT, chat("hi"))).status == 200
