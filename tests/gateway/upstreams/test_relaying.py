"""Requests reach the upstream, and its answers the client, unchanged but for what belongs to one connection."""

import asyncio
import gzip
import re
import zlib
from typing import Any

import msgspec
import pytest

from gateway.upstreams.mock import Received, Reply
from tests.gateway.client import COMPLETIONS, DEADLINE, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, EVENT_STREAM, Connection, chunked, json_reply, saying
from tests.gateway.upstreams.upstream_examples import ANSWER, EVENTS
from tests.gateway.wire import request_bytes, wire


def lowered(received: Received) -> dict[str, str]:
    return {name.lower(): value for name, value in received.headers.items()}


BODIES = {
    "unknown fields": b'{"model":"mock","messages":[{"role":"user","content":"hi","x":{"y":[null,1.50]}}],"z":{"a":1}}',
    "no defaults": b'{"model":"mock","messages":[]}',
    "odd spacing": b'  {\n"messages" : [ ],\t"model":"mock" }\r\n',
    "escapes and unicode": '{"model":"mock","messages":[{"role":"user","content":"\\u00fc ü 🦊 \\/"}]}'.encode(),
    "numbers": b'{"model":"mock","temperature":1.0,"seed":12345678901234567890123,"x":1E+2,"y":-0.0,"top_p":0.10}',
    "nulls": b'{"model":"mock","stop":null,"tools":null,"stream":null}',
    "a large body": b'{"model":"mock","messages":[{"role":"user","content":"' + b"x" * 3_000_000 + b'"}]}',
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", COMPLETIONS, "/v1/embeddings"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_the_body_goes_through_untouched(stage: Stage, body: bytes, path: str) -> None:
    """The upstream gets the body byte for byte."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    await client.post(body, path)

    assert [(received.path, received.body) for received in mock.received] == [(path, body)]


async def test_a_body_sent_in_chunks_goes_through_untouched(stage: Stage) -> None:
    """A chunked body reaches the upstream unchanged, with a framing of its own."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = msgspec.json.encode(chat())
    async with wire(client) as connection:
        await connection.send(head + chunked(body[:20]) + chunked(body[20:]) + chunked(b""))
        answer = await connection.answer()

    assert answer.status == 200
    assert mock.received[0].body == body
    assert "transfer-encoding" not in lowered(mock.received[0])


@pytest.mark.parametrize(("coding", "encode"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
async def test_a_compressed_body_agrees_with_its_headers(stage: Stage, coding: bytes, encode: Any) -> None:
    """A compressed body agrees with its headers at the upstream and has the key of the plain one."""
    seen: list[tuple[bytes, bytes]] = []

    async def converse(connection: Connection) -> None:
        seen.append((connection.head.lower(), connection.body))
        await connection.send(json_reply(ANSWER))

    client = await stage.gateway(await stage.raw(converse))
    body = msgspec.json.encode(chat())
    async with wire(client) as connection:
        await connection.send(request_bytes(encode(body), b"Content-Encoding: " + coding))
        answer = await connection.answer()

    assert answer.status == 200
    head, sent = seen[0]
    assert (sent == encode(body)) == (b"content-encoding: " + coding in head)
    assert sent in (body, encode(body))
    assert (await client.post(chat())).cache == "hit"


async def test_headers_of_the_client_are_passed_on(stage: Stage) -> None:
    """All end-to-end headers of the client reach the upstream."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    headers = {
        "Authorization": "Bearer sk-1",
        "OpenAI-Organization": "org",
        "OpenAI-Beta": "assistants=v2",
        "Idempotency-Key": "k",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "User-Agent": "app/1",
        "Accept": "application/json",
        "X-Custom": "a, b",
        "Content-Type": "application/json; charset=utf-8",
    }
    await client.send("POST", "/v1/chat/completions", chat(), headers)

    received = lowered(mock.received[0])
    assert {name: received.get(name.lower()) for name in headers} == headers
    assert received["host"] == mock.url.removeprefix("http://").removesuffix("/v1")


async def test_no_further_headers_are_added_to_a_request(stage: Stage) -> None:
    """The gateway adds at most Host, Content-Length, Accept-Encoding, the hint about the prompt and the id."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with wire(client) as connection:
        await connection.send(request_bytes(msgspec.json.encode(chat())))
        await connection.answer()

    added = {"host", "content-length", "accept-encoding", "x-keepgate-reuse", "x-request-id"}
    assert set(lowered(mock.received[0])) <= added


async def test_hop_by_hop_headers_do_not_reach_the_upstream(stage: Stage) -> None:
    """Hop-by-hop headers (RFC 9110, section 7.6.1) and the admin key do not reach the upstream."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with wire(client) as connection:
        await connection.send(
            request_bytes(
                msgspec.json.encode(chat()),
                b"Connection: keep-alive, X-Hop",
                b"X-Hop: 1",
                b"Keep-Alive: timeout=5",
                b"TE: trailers",
                b"Trailer: X-Later",
                b"Proxy-Authorization: Basic eA==",
                b"Proxy-Connection: keep-alive",
                b"x-keepgate-admin-key: secret",
                b"X-Stays: 1",
            )
        )
        assert (await connection.answer()).status == 200

    received = lowered(mock.received[0])
    gone = {"x-hop", "keep-alive", "te", "trailer", "proxy-authorization", "proxy-connection", "x-keepgate-admin-key"}
    assert not gone & set(received)
    assert received["x-stays"] == "1"


async def test_headers_of_the_upstream_are_passed_back(stage: Stage) -> None:
    """End-to-end headers of the upstream reach the client of a miss."""
    raw = await stage.raw(
        saying(
            json_reply(
                ANSWER,
                b"x-request-id: r1",
                b"x-ratelimit-remaining-tokens: 99",
                b"openai-processing-ms: 12",
                b"Set-Cookie: a=1",
                b"Set-Cookie: b=2",
                b"Keep-Alive: timeout=1",
                b"X-Hop: 1",
                b"Connection: x-hop",
                b"Server: theirs",
            )
        )
    )
    client = await stage.gateway(raw)
    miss = await client.post(chat())

    assert miss.headers["x-keepgate-upstream-request-id"] == "r1"
    assert miss.headers["x-request-id"] != "r1"
    assert miss.headers["x-ratelimit-remaining-tokens"] == "99"
    # A cookie is of the connection between gateway and upstream: no client's comes back with its requests.
    assert not {"Keep-Alive", "X-Hop", "Set-Cookie"} & set(miss.headers)


async def test_headers_of_one_answer_do_not_come_back_with_a_hit(stage: Stage) -> None:
    """A hit does not have request ids or cookies of the upstream call."""
    mock = await stage.mock(Reply(headers={"x-request-id": "r1", "Set-Cookie": "a=1"}))
    client = await stage.gateway(mock)
    await client.post(chat())
    hit = await client.post(chat())

    assert not {"x-keepgate-upstream-request-id", "Set-Cookie"} & set(hit.headers)
    assert hit.headers["x-request-id"] != "r1"


async def test_the_query_goes_through(stage: Stage) -> None:
    """Query parameters reach the upstream and are part of the key."""
    raw = await stage.raw(saying(json_reply(ANSWER)))
    client = await stage.gateway(raw)
    answers = [await client.post(chat(), f"/v1/chat/completions?api-version={v}&x=%2F%20") for v in (1, 2, 2, 2)]

    assert [answer.cache for answer in answers] == ["miss", "miss", "hit", "hit"]
    assert [c.request_line for c in raw.connections] == [
        f"POST /v1/chat/completions?api-version={version}&x=%2F%20 HTTP/1.1" for version in (1, 2)
    ]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 422, 429, 500, 501, 502, 503, 504, 529, 599])
@pytest.mark.parametrize("body", [b'{"error":{"message":"no"}}', b"<html>Bad gateway</html>", b"", b"\xff\x00"])
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_come_back_with_their_status_and_body(
    stage: Stage, status: int, body: bytes, stream: bool
) -> None:
    """Errors of any content are relayed unchanged."""
    reply = b"HTTP/1.1 %d Some Reason\r\nContent-Type: x/y\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
    client = await stage.gateway(await stage.raw(saying(reply)))
    answer = await client.post(chat(stream=stream))

    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (status, body, "x/y")


async def test_an_error_that_comes_as_events_is_passed_on(stage: Stage) -> None:
    """An error sent as events is relayed with its status and not stored."""
    events = b'data: {"error":{"message":"no"}}\n\n'
    reply = EVENT_STREAM.replace(b"200 OK", b"503 No") + events
    client = await stage.gateway(await stage.raw(saying(reply)))
    answers = [await client.post(chat(stream=True)) for _ in range(2)]

    assert {(answer.status, answer.body, answer.cache) for answer in answers} == {(503, events, "miss")}


async def test_a_redirect_is_not_followed(stage: Stage) -> None:
    """A redirect is relayed and not followed."""
    reply = b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    client = await stage.gateway(await stage.raw(saying(reply)))
    answer = await client.send("POST", "/v1/embeddings", {"model": "mock"})

    assert answer.status == 307


@pytest.mark.parametrize(("coding", "encode"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressed_answer_is_relayed_and_stored(
    stage: Stage, coding: bytes, encode: Any, stream: bool
) -> None:
    """A compressed answer reaches the client with matching headers and is stored."""
    said = b"".join(EVENTS) if stream else ANSWER
    head = EVENT_STREAM if stream else b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    head = head[:-2] + b"Content-Encoding: " + coding + b"\r\n\r\n"
    client = await stage.gateway(await stage.raw(saying(head + encode(said))))
    computed = await client.post(chat(stream=stream), Accept_Encoding="gzip, deflate")
    hit = await client.post(chat(stream=stream), Accept_Encoding="gzip, deflate")

    assert computed.body == said
    assert "Content-Encoding" not in computed.headers
    assert hit.cache == "hit"


async def test_an_answer_that_cannot_be_unpacked_is_502(stage: Stage) -> None:
    """A body that does not match its Content-Encoding gives 502 in OpenAI's form."""
    reply = json_reply(b"this is no gzip", b"Content-Encoding: gzip")
    client = await stage.gateway(await stage.raw(saying(reply)))
    answer = await client.post(chat())

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")


async def test_a_plain_answer_beyond_the_limit_is_relayed_in_pieces(stage: Stage) -> None:
    """A plain answer beyond the limit reaches its client completely and is not stored."""
    body = msgspec.json.encode({"choices": [{"message": {"content": "x" * 3_000_000}, "finish_reason": "stop"}]})

    async def converse(connection: Connection) -> None:
        await connection.send(json_reply(body))

    raw = await stage.raw(converse)
    client = await stage.gateway(raw, cache={"max_answer": 2**20})
    answers = [await client.post(chat()) for _ in range(2)]

    assert [answer.body == body for answer in answers] == [True, True]
    assert [answer.cache for answer in answers] == ["miss", "miss"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/threads?x=%20y"),
        ("GET", "/v1/vector_stores/abc%2Fdef"),
        ("DELETE", "/v1/vector_stores/abc"),
        ("PUT", "/v1/a/b/c"),
        ("PATCH", "/v1/a"),
        ("GET", "/v1/chat/completions/stored"),
        ("GET", "/v1/chat/completions"),
    ],
)
async def test_other_endpoints_are_relayed(stage: Stage, method: str, path: str) -> None:
    """Requests to other endpoints are relayed unchanged and never answered from the cache."""
    raw = await stage.raw(saying(json_reply(b'{"x": 1}', b"X-Theirs: 1", status=b"201 Made")))
    client = await stage.gateway(raw)
    body = b'{"model":"mock"}' if method in ("POST", "PUT", "PATCH") else None
    answers = [await client.send(method, path, body) for _ in range(2)]

    assert {(a.status, a.body, a.headers["X-Theirs"], a.cache) for a in answers} == {(201, b'{"x": 1}', "1", "bypass")}
    assert answers[0].cache_status.fwd == "bypass"
    assert [(c.request_line, c.body) for c in raw.connections] == [(f"{method} {path} HTTP/1.1", body or b"")] * 2


@pytest.mark.parametrize(("method", "length"), [("POST", b"0"), ("PUT", b"0"), ("GET", None), ("DELETE", None)])
async def test_a_post_without_a_body_has_a_length_of_zero(stage: Stage, method: str, length: bytes | None) -> None:
    """A POST without a body has a Content-Length of 0 (RFC 9110, section 8.6)."""
    raw = await stage.raw(saying(json_reply(b"{}")))
    client = await stage.gateway(raw)
    async with wire(client) as connection:
        await connection.send(
            method.encode() + b" /v1/responses/r1/cancel HTTP/1.1\r\nHost: g\r\nContent-Length: 0\r\n\r\n"
        )
        assert (await connection.answer()).status == 200

    sent = re.search(rb"content-length: (\d+)", raw.connections[0].head.lower())
    assert (sent[1] if sent else None) == length


async def test_a_relayed_answer_without_a_body_has_none(stage: Stage) -> None:
    """A relayed 204 has no body."""
    raw = await stage.raw(saying(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"))
    client = await stage.gateway(raw)
    answer = await client.send("DELETE", "/v1/vector_stores/abc")

    assert (answer.status, answer.body) == (204, b"")
    assert "Transfer-Encoding" not in answer.headers


async def test_a_relayed_stream_is_not_buffered(stage: Stage) -> None:
    """A stream of another endpoint is relayed piece by piece."""
    go_on = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM + b"data: 1\n\n")
        await go_on.wait()
        await connection.send(b"data: 2\n\n")

    client = await stage.gateway(await stage.raw(converse))
    async with client.stream({"model": "mock", "stream": True}, "/v1/threads/runs") as stream:
        assert await stream.event() == b"1"
        go_on.set()
        assert await stream.rest() == [b"2"]


async def test_a_relayed_answer_that_breaks_off_does_not_look_whole(stage: Stage) -> None:
    """The client's connection breaks when a relayed answer breaks off."""
    raw = await stage.raw(saying(CHUNKED_EVENT_STREAM + chunked(b"data: 1\n\n")))
    client = await stage.gateway(raw)
    body = b'{"model":"mock"}'
    async with wire(client) as connection:
        await connection.send(request_bytes(body, path=b"/v1/threads/runs"))
        async with asyncio.timeout(DEADLINE):
            said = await connection.reader.read()

    assert b"data: 1" in said
    assert not said.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin",
        "/v1/%2e%2e/admin",
        "/v1/x/../../admin",
        "/v1/..%2fadmin",
        "/v1/x/%2e%2E/%2E./admin",
        "/v1/models/../../admin",
    ],
)
async def test_no_path_leads_out_of_the_upstreams_base(stage: Stage, path: str) -> None:
    """A client cannot reach paths of the upstream's host outside of the base URL."""
    raw = await stage.raw(saying(json_reply(b"{}")))
    client = await stage.gateway(raw.url.replace("/v1", "/api/v1"))
    async with wire(client) as connection:
        await connection.send(b"GET " + path.encode() + b" HTTP/1.1\r\nHost: g\r\n\r\n")
        answer = await connection.answer()

    for seen in raw.connections:
        target = seen.request_line.split()[1].lower().replace("%2e", ".").replace("%2f", "/")
        assert ".." not in target.split("/"), target
    assert answer.status in (200, 400, 404)


async def test_a_base_url_may_have_a_path(stage: Stage) -> None:
    """A base URL may have /v1 or not, a prefix, and a trailing slash."""
    raw = await stage.raw(saying(json_reply(ANSWER)))
    root = raw.url.removesuffix("/v1")
    for base, prefix in (("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/openai/v2", "/openai/v2")):
        client = await stage.gateway(root + base)
        await client.post(chat())
        assert raw.connections[-1].request_line == f"POST {prefix}/chat/completions HTTP/1.1"


async def test_an_absolute_target_is_the_same_target(stage: Stage) -> None:
    """A target in absolute form equals its path (RFC 9112, section 3.2.2)."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with wire(client) as connection:
        await connection.send(request_bytes(b"{}", path=b"http://gateway/v1/threads?x=1"))
        assert (await connection.answer()).status == 200

    assert [received.path for received in mock.received] == ["/v1/threads"]
