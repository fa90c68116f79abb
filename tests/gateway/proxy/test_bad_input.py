"""Invalid input: a 4xx in OpenAI's error form with the reason, a running worker, and no log."""

import asyncio
import json
import logging
import zlib
from typing import Any

import msgspec
import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import COMPLETIONS, DEADLINE, Client, chat
from tests.gateway.conftest import LIMIT, SECRET, Stage
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, EVENT_STREAM, chunked, json_reply, saying
from tests.gateway.wire import request_bytes, wire

MESSAGES: list[Any] = [{"role": "user", "content": SECRET}]

pytestmark = pytest.mark.usefixtures("secret_is_not_logged")


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "mock", "messages": MESSAGES, **fields})


def raw_body(text: str) -> bytes:
    """A body with one more field, written by hand."""
    return b'{"model":"mock","messages":[{"role":"user","content":"' + SECRET.encode() + b'"}],' + text.encode() + b"}"


NOT_JSON: dict[str, bytes] = {
    "nothing": b"",
    "space": b"  \n",
    "text": SECRET.encode(),
    "cut off": body()[:-1],
    "cut off within a string": body()[:-8],
    "one brace more": body() + b"}",
    "two documents": body() + body(),
    "single quotes": body().replace(b'"', b"'"),
    "a comma more": raw_body('"x":1,'),
    "a comment": raw_body('"x":1 /* no */'),
    "NaN": raw_body('"temperature":NaN'),
    "infinity": raw_body('"temperature":Infinity'),
    "minus infinity": raw_body('"temperature":-Infinity'),
    "a number too large": raw_body('"temperature":1e999'),
    "a number with 5000 digits": raw_body('"seed":' + "9" * 5000),
    "a leading zero": raw_body('"seed":01'),
    "a leading plus": raw_body('"seed":+1'),
    "hexadecimal": raw_body('"seed":0x1F'),
    "True": raw_body('"stream":True'),
    "undefined": raw_body('"stream":undefined'),
    "a lone surrogate": raw_body('"x":"\\ud83e"'),
    "surrogates the wrong way round": raw_body('"x":"\\udd8a\\ud83e"'),
    "half an escape": raw_body('"x":"\\u12"'),
    "an unknown escape": raw_body('"x":"\\q"'),
    "a control character": raw_body('"x":"\x01"'),
    "a line break in a string": raw_body('"x":"a\nb"'),
    "invalid UTF-8": body().replace(b"pssst", b"pssst\xff\xfe"),
    "half a character": body().replace(b"pssst", b"pssst\xf0\x9f"),
    "an overlong character": body().replace(b"pssst", b"pssst\xc0\xaf"),
    "UTF-8 surrogates": body().replace(b"pssst", b"pssst\xed\xa0\x80"),
    "UTF-16": body().decode().encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + body(),
    "form data": b"model=mock&prompt=" + SECRET.encode(),
    "a zero byte": body() + b"\x00",
    "deep lists": raw_body('"x":' + "[" * 100_000 + "]" * 100_000),
    "deep objects": raw_body('"x":' + '{"a":' * 50_000 + "1" + "}" * 50_000),
    "deep and never closed": b'{"model":"mock","x":' + b"[" * 500_000,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bad", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_a_body_that_is_not_json_is_400(served: tuple[Client, MockUpstream], bad: bytes, stream: bool) -> None:
    """A body that is not JSON gives 400 in OpenAI's form, calls no upstream and keeps the connection."""
    client, mock = served
    async with wire(client) as connection:
        await connection.send(request_bytes(bad, b"Accept: text/event-stream" if stream else b"Accept: */*"))
        refused = await connection.answer()
        await connection.send(request_bytes(body()))
        after = await connection.answer()

    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert refused.headers["Content-Type"] == "application/json"
    assert after.status == 200
    assert [received.body for received in mock.received] == [body()]


WRONG_TYPES: dict[str, tuple[bytes, str | None]] = {
    "an array": (b"[" + body() + b"]", None),
    "a string": (json.dumps(SECRET).encode(), None),
    "a number": (b"5", None),
    "null": (b"null", None),
    "true": (b"true", None),
    "no model": (msgspec.json.encode({"messages": MESSAGES}), "model"),
    "model null": (body(model=None), "model"),
    "model a number": (body(model=5), "model"),
    "model empty": (body(model=""), "model"),
    "model a list": (body(model=["mock"]), "model"),
    "model an object": (body(model={"id": "mock"}), "model"),
    "stream a string": (body(stream="true"), "stream"),
    "stream a number": (body(stream=1), "stream"),
    "stream a list": (body(stream=[]), "stream"),
    "stream_options a list": (body(stream_options=[]), "stream_options"),
    "stream_options a string": (body(stream_options="include_usage"), "stream_options"),
    "stream_options true": (body(stream_options=True), "stream_options"),
    "include_usage a string": (body(stream_options={"include_usage": "yes"}), "stream_options.include_usage"),
    "include_usage a number": (body(stream_options={"include_usage": 1}), "stream_options.include_usage"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS])
@pytest.mark.parametrize(("bad", "field"), WRONG_TYPES.values(), ids=WRONG_TYPES.keys())
async def test_a_field_that_the_gateway_needs_is_checked(
    served: tuple[Client, MockUpstream], bad: bytes, field: str | None, path: str
) -> None:
    """An invalid field that the gateway needs gives 400 with its name."""
    client, mock = served
    refused = await client.post(bad, path)

    assert (refused.status, refused.error["type"], refused.error["param"]) == (400, "invalid_request_error", field)
    assert mock.received == []


ODD_BUT_NOT_OURS: dict[str, bytes] = {
    "messages missing": b'{"model":"mock"}',
    "messages a string": body(messages=SECRET),
    "messages of messages": body(messages=[[MESSAGES]]),
    "messages of numbers": body(messages=[1, None, True]),
    "content an object": body(messages=[{"role": "user", "content": {"a": SECRET}}]),
    "content parts without text": body(messages=[{"role": "user", "content": [{"type": "text"}]}]),
    "unknown roles": body(messages=[{"role": 7}]),
    "prompt an object": body(prompt={}),
    "temperature a string": body(temperature="hot"),
    "temperature a list": body(temperature=[0]),
    "seed a string": body(seed=SECRET),
    "n negative": body(n=-1),
    "max_tokens huge": raw_body('"max_tokens":' + "9" * 300),
    "a tiny number": raw_body('"temperature":1e-400'),
    "keys that are empty": raw_body('"":1,"\\u0000":2'),
    "many keys": body(**{f"k{n}": n for n in range(20_000)}),
    "fields named like ours": body(key="x", namespace="y", family="z", path="/etc/passwd", __proto__={"a": 1}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("odd", ODD_BUT_NOT_OURS.values(), ids=ODD_BUT_NOT_OURS.keys())
async def test_fields_that_the_gateway_does_not_need_are_not_checked(
    served: tuple[Client, MockUpstream], odd: bytes, stream: bool
) -> None:
    """A field that the gateway does not need goes to the upstream unchecked."""
    client, mock = served
    error = {"message": f"what is {SECRET}?", "type": "invalid_request_error", "param": None, "code": None}
    mock.replies[:] = [Reply(status=422, error=error)]
    sent = odd[:-1] + b',"stream":true}' if stream else odd
    answer = await client.post(sent)

    assert (answer.status, answer.json) == (422, {"error": error})
    asking = sent.replace(b"{", b'{"stream_options":{"include_usage":true},', 1)
    assert [received.body for received in mock.received] == [asking if stream else sent]


# Size and pace


async def test_a_body_over_the_limit_is_413_before_it_is_sent(served: tuple[Client, MockUpstream]) -> None:
    """A Content-Length over the limit gives 413 before the body is sent."""
    client, mock = served
    async with wire(client) as connection:
        await connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 99999999999\r\n\r\n")
        refused = await connection.answer()

    assert (refused.status, refused.error["code"]) == (413, "body_too_large")
    assert refused.error["message"] == "The body is longer than 1MiB."
    assert mock.received == []


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings"])
async def test_a_body_over_the_limit_without_a_length_is_413(served: tuple[Client, MockUpstream], path: bytes) -> None:
    """A chunked body over the limit gives 413 and is read only up to the limit."""
    client, mock = served
    piece = chunked(SECRET.encode() * 4000)
    async with wire(client) as connection:
        await connection.send(b"POST " + path + b" HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n")

        async def pour() -> None:
            try:
                while True:
                    await connection.send(piece)
            except ConnectionError:
                return

        pouring = asyncio.create_task(pour())
        refused = await connection.answer()
        pouring.cancel()

    assert (refused.status, refused.error["code"]) == (413, "body_too_large")
    assert mock.received == []


async def test_a_body_at_the_limit_is_taken(served: tuple[Client, MockUpstream]) -> None:
    """A body of exactly the limit is accepted, and one byte more is not."""
    client, mock = served
    whole = body(x="y" * (LIMIT - len(body(x=""))))
    assert len(whole) == LIMIT
    assert (await client.post(whole)).status == 200
    assert (await client.post(whole + b" ")).status == 413
    assert len(mock.received) == 1


async def test_a_packed_body_is_measured_unpacked(served: tuple[Client, MockUpstream]) -> None:
    """A compressed body is measured by its unpacked size."""
    client, mock = served
    packer = zlib.compressobj(9)
    bomb = b"".join(packer.compress(b" " * 2**20) for _ in range(64)) + packer.flush()
    async with wire(client) as connection:
        await connection.send(request_bytes(bomb, b"Content-Encoding: deflate"))
        refused = await connection.answer()

    assert refused.status == 413
    assert mock.received == []


async def test_a_packed_body_that_cannot_be_unpacked_is_400(served: tuple[Client, MockUpstream]) -> None:
    """A compressed body that cannot be unpacked gives 400 in OpenAI's form."""
    client, mock = served
    async with wire(client) as connection:
        await connection.send(request_bytes(SECRET.encode(), b"Content-Encoding: gzip"))
        refused = await connection.answer()

    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert mock.received == []


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings"])
@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
async def test_a_body_that_does_not_come_is_408(
    served: tuple[Client, MockUpstream], framing: bytes, path: bytes
) -> None:
    """A body that does not arrive within timeouts.client gives 408."""
    client, mock = served
    async with wire(client) as connection:
        await connection.send(b"POST " + path + b" HTTP/1.1\r\nHost: g\r\n" + framing + b"\r\n\r\n")
        refused = await connection.answer()

    assert (refused.status, refused.error["code"]) == (408, "request_timeout")
    assert mock.received == []


async def test_a_body_that_comes_too_slowly_is_408(served: tuple[Client, MockUpstream]) -> None:
    """A body that arrives byte by byte gives 408 after timeouts.client."""
    client, mock = served
    async with wire(client) as connection:
        await connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nContent-Length: 1000\r\n\r\n")

        async def drip() -> None:
            while True:
                await connection.send(b" ")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        refused = await connection.answer()
        dripping.cancel()

    assert refused.status == 408
    assert mock.received == []


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/embeddings"])
async def test_a_body_that_breaks_off_reaches_no_upstream(served: tuple[Client, MockUpstream], path: bytes) -> None:
    """A request whose client disconnects within the body calls no upstream."""
    client, mock = served
    for cut in (0, 1, 30):
        async with wire(client) as connection:
            await connection.send(request_bytes(body(), path=path)[: -len(body()) + cut])
            connection.writer.write_eof()
            async with asyncio.timeout(DEADLINE):
                await connection.reader.read()

    assert mock.received == []


async def test_expect_100_continue_is_answered(served: tuple[Client, MockUpstream]) -> None:
    """A request with Expect: 100-continue gets 100 before its body (RFC 9110, section 10.1.1)."""
    client, _ = served
    for _ in range(3):
        async with wire(client) as connection:
            request = request_bytes(body(), b"Expect: 100-continue")
            await connection.send(request[: -len(body())])
            assert await connection.line() == b"HTTP/1.1 100 Continue"
            assert await connection.line() == b""
            await connection.send(body())
            assert (await connection.answer()).status == 200


# HTTP


WRONG_PLACES: list[tuple[str, str, int]] = [
    ("GET", "/nonsense", 404),
    ("POST", "/chat/completions", 404),
    ("POST", "/v1", 404),
    ("POST", "/health", 405),
    ("DELETE", "/metrics", 405),
    ("PUT", "/v1/cache/stats", 404),
    ("POST", "/v1/cache/entries/x", 404),
    ("GET", f"/{SECRET}", 404),
]


@pytest.mark.parametrize(("method", "path", "status"), WRONG_PLACES)
async def test_a_wrong_method_or_path_is_refused(
    served: tuple[Client, MockUpstream], method: str, path: str, status: int
) -> None:
    """A wrong method or path gives 404 or 405 in OpenAI's form."""
    client, mock = served
    refused = await client.send(method, path)

    assert (refused.status, refused.error["type"]) == (status, "invalid_request_error")
    assert mock.received == []


async def test_a_connection_without_a_request_does_no_harm(served: tuple[Client, MockUpstream]) -> None:
    """A connection that ends without a request leaves the gateway serving."""
    client, _ = served
    for said in (b"", b"\r\n", b"G", b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\n"):
        async with wire(client) as connection:
            await connection.send(said) if said else None
            connection.writer.write_eof()
            async with asyncio.timeout(DEADLINE):
                await connection.reader.read()


@pytest.mark.parametrize(
    "value",
    ["max-age=" + "9" * 400, "=" * 5000, '"' * 999, ", " * 3000, "max-age=\u00b2", "no-cache=x=y", "max-stale=1e999"],
)
async def test_an_invalid_cache_control_is_no_error(served: tuple[Client, MockUpstream], value: str) -> None:
    """An invalid Cache-Control is ignored or read strictly (RFC 9111, section 4.2.1)."""
    client, _ = served
    sent = request_bytes(body(), b"Cache-Control: " + value.encode())
    for _ in range(2):
        async with wire(client) as connection:
            await connection.send(sent)
            assert (await connection.answer()).status == 200


# What is logged when something fails


UPSTREAM_FAILURES: dict[str, bytes] = {
    "an error": json_reply(b'{"error":{"message":"' + SECRET.encode() + b'"}}', status=b"500 No"),
    "an error of the request": json_reply(SECRET.encode(), status=b"400 " + SECRET.encode()),
    "no HTTP": SECRET.encode() + b"\r\n\r\n",
    "a bad header": b"HTTP/1.1 200 OK\r\n" + SECRET.encode() + b"\r\n\r\n",
    "a body that is no JSON": json_reply(SECRET.encode()),
    "a body that breaks off": json_reply(SECRET.encode())[:-3],
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + SECRET.encode() + b"\r\n",
    "a bad packing": json_reply(SECRET.encode(), b"Content-Encoding: gzip"),
    "events that are no JSON": EVENT_STREAM + b"data: " + SECRET.encode() + b"\n\ndata: [DONE]\n\n",
    "an event of an odd form": EVENT_STREAM + b'data: {"choices":["' + SECRET.encode() + b'"]}\n\ndata: [DONE]\n\n',
    "an error event": EVENT_STREAM + b'data: {"error":"' + SECRET.encode() + b'"}\n\n',
    "a stream that breaks off": CHUNKED_EVENT_STREAM + chunked(b"data: " + SECRET.encode() + b"\n\n"),
    "a bad chunk within a stream": CHUNKED_EVENT_STREAM + chunked(b"data: 1\n\n") + SECRET.encode() + b"\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS, "/v1/embeddings"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", UPSTREAM_FAILURES.values(), ids=UPSTREAM_FAILURES.keys())
async def test_an_upstream_that_fails_leaves_no_text_in_the_log(
    stage: Stage, said: bytes, stream: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A failing upstream leaves neither the tenant's nor its own text in the log."""
    client = (await stage.gateway(await stage.raw(saying(said)))).tenant(SECRET)
    async with wire(client) as connection:
        sent = request_bytes(body(stream=stream), b"Authorization: " + SECRET.encode(), path=path.encode())
        await connection.send(sent)
        async with asyncio.timeout(DEADLINE):
            status = (await connection.line()).split()[1]

    assert status in (b"200", b"400", b"500", b"502")
    assert [
        record
        for record in caplog.records
        if record.name.startswith(("gateway", "aiohttp")) and record.levelno >= logging.ERROR
    ] == []


async def test_requests_that_succeed_leave_no_text_in_the_log(stage: Stage) -> None:
    """Successful requests leave no prompt, answer or key in the debug logs."""
    client = (await stage.gateway(await stage.mock())).tenant(SECRET)
    for stream in (False, True, False, True):
        assert (await client.post(chat(SECRET, stream=stream, user=SECRET))).text == SECRET
    entry = (await client.post(chat(SECRET, user=SECRET))).entry
    await client.get(f"/v1/cache/entries/{entry}")
    await client.send("DELETE", f"/v1/cache/entries/{entry}")
    await client.send("DELETE", f"/v1/cache?model={SECRET}")
    await client.get(f"/v1/models/{SECRET}")
