"""Upstreams get the client's requests, and clients get the upstream's answers."""

import asyncio
import gzip
import json
import random
import re
import socket
import zlib
from typing import Any, cast

import msgspec
import pytest

from gateway.upstreams.mock import MockUpstream, Received, Reply
from tests.gateway.client import COMPLETIONS, DEADLINE, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, EVENT_STREAM, Connection, chunked, json_reply, saying
from tests.gateway.wire import Wire, request_bytes, wire

ANSWER = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    }
)


def lowered(received: Received) -> dict[str, str]:
    return {name.lower(): value for name, value in received.headers.items()}


# What is passed on


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
    """Byte for byte: no default added, no unknown field dropped, no number reformatted."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    await client.post(body, path)

    assert [(received.path, received.body) for received in mock.received] == [(path, body)]


async def test_a_body_sent_in_chunks_goes_through_untouched(stage: Stage) -> None:
    """Each hop has its own framing of the body."""
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
async def test_a_compressed_body_reaches_the_upstream_in_agreement_with_its_headers(
    stage: Stage, coding: bytes, encode: Any
) -> None:
    """The upstream can read it, compressed or not, and it has the same key as the plain request."""
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
    """Credentials, organisation, idempotency keys, tracing, content type: all end-to-end headers."""
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
        "Cookie": "session=1",
        "Content-Type": "application/json; charset=utf-8",
    }
    await client.send("POST", "/v1/chat/completions", chat(), headers)

    received = lowered(mock.received[0])
    assert {name: received.get(name.lower()) for name in headers} == headers
    assert received["host"] == mock.url.removeprefix("http://").removesuffix("/v1")


async def test_nothing_is_added_for_a_client_that_says_little(stage: Stage) -> None:
    """No user agent, no accept header and no credential of its own; only the hint whether the prompt may come again."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with wire(client) as connection:
        await connection.send(request_bytes(msgspec.json.encode(chat())))
        await connection.answer()

    assert set(lowered(mock.received[0])) <= {"host", "content-length", "accept-encoding", "x-keepgate-reuse"}


async def test_headers_between_client_and_gateway_stay_there(stage: Stage) -> None:
    """Hop-by-hop headers (RFC 9110, section 7.6.1), also those that Connection names, and the admin key."""
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
    """Rate limits, request ids and cookies reach the client of a miss; hop-by-hop headers do not."""
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

    assert miss.headers["x-request-id"] == "r1"
    assert miss.headers["x-ratelimit-remaining-tokens"] == "99"
    assert miss.headers.getall("Set-Cookie") == ["a=1", "b=2"]
    assert not {"Keep-Alive", "X-Hop"} & set(miss.headers)


async def test_headers_of_one_answer_do_not_come_back_with_a_hit(stage: Stage) -> None:
    """A request id or a cookie belongs to one call, not to the answer."""
    mock = await stage.mock(Reply(headers={"x-request-id": "r1", "Set-Cookie": "a=1"}))
    client = await stage.gateway(mock)
    await client.post(chat())
    hit = await client.post(chat())

    assert not {"x-request-id", "Set-Cookie"} & set(hit.headers)


async def test_the_query_goes_through(stage: Stage) -> None:
    """Query parameters (api-version at some clouds) reach the upstream, and are part of the key."""
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
    """They are relayed unchanged, for any content."""
    reply = b"HTTP/1.1 %d Some Reason\r\nContent-Type: x/y\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
    client = await stage.gateway(await stage.raw(saying(reply)))
    answer = await client.post(chat(stream=stream))

    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (status, body, "x/y")


async def test_an_error_that_comes_as_events_is_passed_on(stage: Stage) -> None:
    """Status and body stay, and nothing is kept."""
    events = b'data: {"error":{"message":"no"}}\n\n'
    reply = EVENT_STREAM.replace(b"200 OK", b"503 No") + events
    client = await stage.gateway(await stage.raw(saying(reply)))
    answers = [await client.post(chat(stream=True)) for _ in range(2)]

    assert {(answer.status, answer.body, answer.cache) for answer in answers} == {(503, events, "miss")}


async def test_a_redirect_is_not_followed(stage: Stage) -> None:
    """A client's credentials are sent only to configured hosts."""
    reply = b"HTTP/1.1 307 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
    client = await stage.gateway(await stage.raw(saying(reply)))
    answer = await client.send("POST", "/v1/embeddings", {"model": "mock"})

    assert answer.status == 307


# Streams


EVENTS = [
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":"Gr\xc3\xbc"}}]}\n\n',
    b": keep-alive\n\n",
    b'event: delta\nid: 7\nretry: 10\ndata: {"choices":[{"index":0,"delta":{"content":"\xc3\x9fe"}}]}\n\n',
    b'data:{"choices":[{"index":0,\ndata: "delta":{"content":"!"}}]}\n\n',
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]


def with_breaks(kind: bytes) -> bytes:
    return b"".join(EVENTS).replace(b"\n", kind)


@pytest.mark.parametrize("line_break", [b"\n", b"\r\n", b"\r"])
async def test_every_way_to_write_events_is_understood_and_passed_on(stage: Stage, line_break: bytes) -> None:
    """Comments, event names, ids, data on several lines, any line break (WHATWG HTML, section 9.2)."""
    # After a lone CR the end of the last event is known only from the next bytes.
    said = with_breaks(line_break) + (b": end\r\r: end" if line_break == b"\r" else b"")
    client = await stage.gateway(await stage.raw(saying(EVENT_STREAM + said)))
    computed = await client.post(chat(stream=True))
    plain = await client.post(chat())

    assert computed.body == said
    if line_break != b"\r":
        assert plain.cache == "hit"
        assert plain.text == "Grüße!"


@pytest.mark.parametrize("line_break", [b"\n", b"\r\n"])
async def test_events_may_be_cut_anywhere(stage: Stage, line_break: bytes) -> None:
    """For any cut, within a character, a line break or a word, the answer is the same and is stored."""
    said = with_breaks(line_break)
    cut = 0

    async def converse(connection: Connection) -> None:
        await connection.send_apart(CHUNKED_EVENT_STREAM, chunked(said[:cut]), chunked(said[cut:]) + chunked(b""))

    client = await stage.gateway(await stage.raw(converse))
    for cut in range(1, len(said)):
        computed = await client.post(chat(f"cut at {cut}", stream=True))
        assert computed.body == said
        plain = await client.post(chat(f"cut at {cut}"))
        assert (plain.cache, plain.text) == ("hit", "Grüße!"), cut


@pytest.mark.parametrize("seed", range(8))
async def test_events_may_be_cut_into_many_pieces(stage: Stage, seed: int) -> None:
    """Random pieces, down to single bytes, of one stream."""
    rng = random.Random(seed)  # noqa: S311  # not a secret
    said = with_breaks(rng.choice([b"\n", b"\r\n"]))
    cuts = sorted(rng.sample(range(1, len(said)), rng.choice([3, 20, len(said) - 1])))
    chunks = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    client = await stage.gateway(await stage.raw(saying(EVENT_STREAM, *chunks)))

    assert (await client.post(chat(stream=True))).body == said
    assert (await client.post(chat())).text == "Grüße!"


async def test_events_arrive_when_they_are_sent(stage: Stage) -> None:
    """Each event reaches the client before the upstream sends the next: there is no buffering."""
    go_on = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM)
        for event in EVENTS:
            await connection.send(event)
            await go_on.wait()
            go_on.clear()

    client = await stage.gateway(await stage.raw(converse))
    async with client.stream(chat(stream=True)) as stream:
        for event in EVENTS:
            assert event.endswith(await stream.event() + b"\n\n")
            go_on.set()
        assert await stream.event() == b""


@pytest.mark.parametrize("tail", [b"", b"data: [DO", b'data: {"choices":[]', b"\n", b": bye"])
async def test_a_stream_that_ends_early_is_passed_on_and_not_kept(stage: Stage, tail: bytes) -> None:
    """It ends without [DONE], or within an event: the client gets the sent bytes, and nothing is stored."""
    said = b"".join(EVENTS[:-1]) + tail
    raw = await stage.raw(saying(EVENT_STREAM + said))
    client = await stage.gateway(raw)
    answers = [await client.post(chat(stream=True)) for _ in range(2)]

    assert {answer.body for answer in answers} == {said}
    assert len(raw.connections) == 2


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_a_stream_that_breaks_off_ends_in_an_error_event(stage: Stage, framing: str) -> None:
    """The stream ends with an error in OpenAI's form and without [DONE], and nothing is stored."""
    head = CHUNKED_EVENT_STREAM if framing == "chunked" else EVENT_STREAM[:-2] + b"Content-Length: 9999\r\n\r\n"
    said = EVENTS[0] + EVENTS[4]
    raw = await stage.raw(saying(head + (chunked(said) if framing == "chunked" else said)))
    client = await stage.gateway(raw)
    answers = [await client.post(chat(stream=True)) for _ in range(2)]

    for answer in answers:
        assert answer.body.startswith(said)
        error = json.loads(answer.body.removeprefix(said).removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("upstream_error", "upstream_cut")
    assert len(raw.connections) == 2


@pytest.mark.parametrize("ending", ["cut", "silent"])
async def test_a_stream_has_ended_when_it_says_so(stage: Stage, ending: str) -> None:
    """After [DONE] the answer is complete and stored, even if the connection breaks or never ends."""
    said = EVENTS[0] + EVENTS[4] + EVENTS[5]

    async def serve(connection: Connection) -> None:
        await connection.send(CHUNKED_EVENT_STREAM + chunked(said))
        if ending == "cut":
            connection.cut()
        else:
            await connection.closed()

    raw = await stage.raw(serve)
    client = await stage.gateway(raw)
    first, second = [await client.post(chat(stream=True)) for _ in range(2)]

    assert first.body == said
    assert (first.cache, second.cache) == ("miss", "hit")


async def test_an_upstream_that_answers_a_stream_request_with_json_is_passed_on(stage: Stage) -> None:
    """The client gets the JSON unchanged; later hits are streamed."""
    client = await stage.gateway(await stage.raw(saying(json_reply(ANSWER))))
    computed = await client.post(chat(stream=True))
    hit = await client.post(chat(stream=True))

    assert (computed.body, computed.headers["Content-Type"]) == (ANSWER, "application/json")
    assert (hit.cache, hit.text) == ("hit", "ok")
    assert hit.headers["Content-Type"] == "text/event-stream"


async def test_an_upstream_that_streams_unasked_is_passed_on(stage: Stage) -> None:
    """On a miss the client gets the shape that the upstream chose."""
    client = await stage.gateway(await stage.raw(saying(EVENT_STREAM + b"".join(EVENTS))))
    computed = await client.post(chat())

    assert computed.body == b"".join(EVENTS)
    assert (await client.post(chat())).text == "Grüße!"


@pytest.mark.parametrize(("coding", "encode"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_compressed_answer_is_understood(stage: Stage, coding: bytes, encode: Any, stream: bool) -> None:
    """The client gets a body that matches its headers, and the answer is stored."""
    said = b"".join(EVENTS) if stream else ANSWER
    head = EVENT_STREAM if stream else b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    head = head[:-2] + b"Content-Encoding: " + coding + b"\r\n\r\n"
    client = await stage.gateway(await stage.raw(saying(head + encode(said))))
    computed = await client.post(chat(stream=stream), Accept_Encoding="gzip, deflate")
    hit = await client.post(chat(stream=stream), Accept_Encoding="gzip, deflate")

    assert computed.body == said
    assert "Content-Encoding" not in computed.headers
    assert hit.cache == "hit"


async def test_an_answer_that_cannot_be_unpacked_is_an_error(stage: Stage) -> None:
    """A body that does not match its Content-Encoding is 502 in OpenAI's form."""
    reply = json_reply(b"this is no gzip", b"Content-Encoding: gzip")
    client = await stage.gateway(await stage.raw(saying(reply)))
    answer = await client.post(chat())

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\r\n",
        b"HTTP/1.1",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x00\x00",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_does_not_speak_http_is_502(stage: Stage, said: bytes, stream: bool) -> None:
    """The error has OpenAI's form, and the gateway works on."""
    raw = await stage.raw(saying(said))
    client = await stage.gateway(raw)
    answer = await client.post(chat(stream=stream))

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")
    raw.conversation = saying(json_reply(ANSWER))
    assert (await client.post(chat(stream=stream))).status == 200


# Time


def nothing_listens() -> str:
    """The URL of a port that refuses connections."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


async def hang(connection: Connection) -> None:
    """Send nothing until the gateway closes."""
    await connection.closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_upstreams_that_cannot_be_reached_are_502(stage: Stage, stream: bool) -> None:
    """The error has OpenAI's form, and names each of them."""
    urls = [nothing_listens(), nothing_listens()]
    client = await stage.gateway(*urls)
    answer = await client.post(chat(stream=stream))

    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    assert all(url.removeprefix("http://").removesuffix("/v1") in answer.error["message"] for url in urls)


async def test_a_connection_that_does_not_come_about_is_given_up(stage: Stage) -> None:
    """It fails after timeouts.connect, also if the host neither accepts nor refuses."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        url = f"http://127.0.0.1:{full.getsockname()[1]}/v1"
        client = await stage.gateway(url, timeouts={"connect": 0.2, "first_byte": 15})
        answer = await client.post(chat())
        for filler in fillers:
            filler.close()

    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_does_not_begin_is_504(stage: Stage, stream: bool) -> None:
    """It fails after timeouts.first_byte; the upstream call is cancelled."""
    ended = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await connection.closed()
        ended.set()

    client = await stage.gateway(await stage.raw(converse), timeouts={"first_byte": 0.15})
    answer = await client.post(chat(stream=stream))

    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    async with asyncio.timeout(DEADLINE):
        await ended.wait()


async def test_a_plain_answer_that_stalls_is_504(stage: Stage) -> None:
    """It fails after timeouts.idle without a byte."""

    async def converse(connection: Connection) -> None:
        await connection.send(json_reply(ANSWER)[:-5])
        await hang(connection)

    client = await stage.gateway(await stage.raw(converse), timeouts={"idle": 0.15})
    answer = await client.post(chat())

    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")


async def test_a_stream_that_stalls_ends_in_an_error_event(stage: Stage) -> None:
    """It ends after timeouts.idle without a byte; earlier events stay."""

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM + EVENTS[0])
        await hang(connection)

    client = await stage.gateway(await stage.raw(converse), timeouts={"idle": 0.15})
    answer = await client.post(chat(stream=True))

    assert answer.body.startswith(EVENTS[0])
    assert json.loads(answer.events[1])["error"]["code"] == "upstream_timeout"
    assert b"[DONE]" not in answer.body


async def test_a_slow_answer_that_keeps_coming_is_not_given_up(stage: Stage) -> None:
    """The limits are on idle time only: an answer may take many times timeouts.idle."""
    mock = await stage.mock(Reply(text="word " * 60, pause=0.06))
    client = await stage.gateway(mock, timeouts={"idle": 0.5, "first_byte": 0.5})
    answer = await client.post(chat(stream=True))

    assert answer.text == "word " * 60


async def test_a_reader_that_pauses_is_not_the_upstreams_silence(stage: Stage) -> None:
    """The time of a slow client does not count as the upstream's."""

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM)
        for _ in range(40 * 16):
            await connection.send(b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % (b"x" * 65_000))
        await connection.send(b"".join(EVENTS))

    client = await stage.gateway(await stage.raw(converse), timeouts={"idle": 0.2}, cache={"max_answer": 2**20})
    async with client.stream(chat(stream=True)) as stream:
        await stream.event()
        await asyncio.sleep(0.6)
        rest = await stream.rest()

    assert rest[-1] == b"[DONE]"


# Several upstreams


async def test_another_upstream_answers_when_one_cannot_be_reached(stage: Stage) -> None:
    """The request goes to the next, in any order of the list."""
    mock = await stage.mock()
    for upstreams in ((nothing_listens(), mock), (mock, nothing_listens())):
        client = await stage.gateway(*upstreams)
        answers = [await client.post(chat(f"{number}")) for number in range(4)]
        assert {answer.status for answer in answers} == {200}
    assert len(mock.received) == 8


async def test_an_upstreams_error_is_not_tried_elsewhere(stage: Stage) -> None:
    """429 and 500 are relayed to the client."""
    error = Reply(status=500, error={"message": "no"})
    one, other = await stage.mock(error), await stage.mock(error)
    client = await stage.gateway(one, other)
    answer = await client.post(chat())

    assert answer.status == 500
    assert len(one.received) + len(other.received) == 1


async def test_a_request_that_was_read_is_not_sent_again(stage: Stage) -> None:
    """An upstream that closes after a request may have begun to work: one client request is one call."""

    async def converse(connection: Connection) -> None:
        connection.cut()

    raw = await stage.raw(converse)
    client = await stage.gateway(raw)
    answer = await client.post(chat())

    assert answer.status == 502
    assert len(raw.connections) == 1


async def test_a_request_goes_where_its_model_is(stage: Stage) -> None:
    """Requests are routed by the listed models, also with a slash in the name."""
    one = await stage.mock(models=("small", "org/large"))
    other = await stage.mock(models=("huge",))
    client = await stage.gateway(one, other)
    await client.gateway.router.refresh()
    for model in ("small", "org/large", "huge", "huge", "small"):
        await client.post(chat(f"for {model}", model=model), Cache_Control="no-cache")

    assert [r.fields["model"] for r in one.received] == ["small", "org/large", "small"]
    assert [r.fields["model"] for r in other.received] == ["huge", "huge"]


async def test_a_model_that_nobody_lists_is_asked_for_all_the_same(stage: Stage) -> None:
    """Some servers accept unlisted names; their answer is relayed."""
    mock = await stage.mock(Reply(status=404, error={"message": "no such model", "code": "model_not_found"}))
    client = await stage.gateway(mock)
    await client.gateway.router.refresh()
    answer = await client.post(chat(model="unheard-of"))

    assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")


async def test_requests_are_spread_over_upstreams_of_one_model(stage: Stage) -> None:
    """The least busy upstream gets the next request."""
    mocks = [await stage.mock() for _ in range(3)]
    client = await stage.gateway(*mocks)
    await client.gateway.router.refresh()
    for mock in mocks:
        mock.hold.clear()
    asking = []
    for number in range(9):
        asking.append(asyncio.create_task(client.post(chat(f"{number}"))))
        async with asyncio.timeout(DEADLINE):
            while sum(len(mock.received) for mock in mocks) <= number:  # noqa: ASYNC110  # three mocks, one count
                await asyncio.sleep(0)
    for mock in mocks:
        mock.hold.set()
    await asyncio.gather(*asking)

    assert [len(mock.received) for mock in mocks] == [3, 3, 3]


async def test_an_upstream_that_comes_back_is_used_again(stage: Stage) -> None:
    """The gateway continues after a restart of the backend."""
    first = MockUpstream()
    async with first.serving():
        client = await stage.gateway(first)
        assert (await client.post(chat("1"))).status == 200
        port = int(first.url.rsplit(":")[-1].split("/")[0])
    assert (await client.post(chat("2"))).status == 502

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(json_reply(ANSWER))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", port, reuse_address=True)
    assert (await client.post(chat("3"))).status == 200
    server.close()


async def test_a_connection_that_the_upstream_closed_meanwhile_is_no_error(stage: Stage) -> None:
    """A kept-alive connection may be closed before its use: the request uses another one."""
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        await reader.readuntil(b"\r\n\r\n")
        writer.write(json_reply(ANSWER).replace(b"Connection: close\r\n", b""))
        await writer.drain()
        served += 1
        # Without an announcement.
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await stage.gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    answers = [await client.post(chat(f"{number}")) for number in range(20)]
    server.close()

    assert {answer.status for answer in answers} == {200}


@pytest.mark.parametrize("ending", ["closed", "reset"])
async def test_many_connections_that_ended_meanwhile_are_no_error(stage: Stage, ending: str) -> None:
    """All of them may have ended unnoticed; the request then gets a new one."""
    open_connections: list[asyncio.StreamWriter] = []
    answering = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        open_connections.append(writer)
        served = 0
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            if served:  # a second request on one connection finds it ended
                if ending == "reset":
                    writer.transport.abort()
                else:
                    writer.close()
                return
            served += 1
            await answering.wait()
            writer.write(json_reply(ANSWER).replace(b"Connection: close\r\n", b""))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await stage.gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    crowd = [asyncio.create_task(client.post(chat(f"{number}"))) for number in range(8)]
    async with asyncio.timeout(DEADLINE):
        while len(open_connections) < 8:  # noqa: ASYNC110 (each is a connection that the gateway made)
            await asyncio.sleep(0.01)
    answering.set()
    first = await asyncio.gather(*crowd)
    second = [await client.post(chat(f"again {number}")) for number in range(8)]
    server.close()

    assert {answer.status for answer in (*first, *second)} == {200}


async def test_a_request_that_fails_the_upstream_is_not_sent_twice(stage: Stage) -> None:
    """A connection that ends later was ended by the request: it is an error, on a reused connection, too."""
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            requests += head.startswith(b"POST")
            if requests == 2:
                await asyncio.sleep(0.6)  # it works on it
                writer.close()
                return
            writer.write(json_reply(ANSWER).replace(b"Connection: close\r\n", b""))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await stage.gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    answers = [await client.post(chat(f"{number}")) for number in range(2)]
    server.close()

    assert [answer.status for answer in answers] == [200, 502]
    assert requests == 2


async def test_what_a_frozen_upstream_does_not_take_is_given_up(stage: Stage) -> None:
    """The connection of a cancelled call is closed, with unsent data."""
    gone = asyncio.Event()

    class Frozen(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast(asyncio.Transport, transport)
            self.transport.pause_reading()

        def connection_lost(self, exc: Exception | None) -> None:
            gone.set()

    frozen: list[Frozen] = []

    def connect() -> Frozen:
        frozen.append(Frozen())
        return frozen[-1]

    server = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
    client = await stage.gateway(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeouts={"first_byte": 0.3}, max_body=2**26
    )
    refused = await client.post(chat("x" * 2**24))
    for connection in frozen:
        connection.transport.resume_reading()
    async with asyncio.timeout(DEADLINE):
        await gone.wait()
    server.close()

    assert refused.status == 504


@pytest.mark.parametrize("apart", [False, True], ids=["with the first answer", "later"])
async def test_an_answer_that_nobody_asked_for_is_answered_to_nobody(stage: Stage, apart: bool) -> None:
    """Extra bytes of an upstream are not used as the answer to the next request."""
    answered = asyncio.Event()
    said = asyncio.Event()
    right = json_reply(ANSWER).replace(b"Connection: close\r\n", b"")
    wrong = json_reply(ANSWER.replace(b'"ok"', b'"no"')).replace(b"Connection: close\r\n", b"")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            if head.startswith(b"GET"):
                writer.write(right)
            elif apart:
                writer.write(right)
                await answered.wait()
                writer.write(wrong)
                said.set()
            else:
                writer.write(right + wrong)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await stage.gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    first = await client.post(chat("a"))
    answered.set()
    if apart:
        async with asyncio.timeout(DEADLINE):
            await said.wait()
        # The gateway runs on this loop, and reads during these turns.
        for _ in range(20):
            await asyncio.sleep(0)
    second = await client.post(chat("b"))
    server.close()

    assert (first.text, second.text) == ("ok", "ok")


# Other endpoints


async def test_models_of_all_upstreams_are_listed_once(stage: Stage) -> None:
    """The first upstream that lists a model describes it; unknown fields stay."""
    one = await stage.mock(models=("a", "org/b"))
    other = await stage.mock(models=("org/b", "c"))
    client = await stage.gateway(one, other, nothing_listens())
    answer = await client.get("/v1/models")

    assert answer.json["object"] == "list"
    assert sorted(model["id"] for model in answer.json["data"]) == ["a", "c", "org/b"]
    assert all(model["owned_by"] == "keepgate" for model in answer.json["data"])


@pytest.mark.parametrize("path", ["/v1/models/org/large", "/v1/models/org%2Flarge"])
async def test_a_model_with_a_slash_is_shown(stage: Stage, path: str) -> None:
    """The slash may be plain or escaped."""
    client = await stage.gateway(await stage.mock(models=("small",)), await stage.mock(models=("org/large",)))
    await client.gateway.router.refresh()

    assert (await client.get(path)).json["id"] == "org/large"


async def test_a_model_that_is_not_there_is_404(stage: Stage) -> None:
    """The upstream's error is relayed."""
    client = await stage.gateway(await stage.mock())

    assert (await client.get("/v1/models/none")).json["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("listed", [b"[]", b'{"data":5}', b'{"data":[{"x":1}]}', b'{"data":[{"id":[]}]}', b"<html>"])
async def test_a_list_of_models_in_another_form_is_an_error_not_a_fault(stage: Stage, listed: bytes) -> None:
    """The error names the upstream."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(json_reply(listed))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = await stage.gateway(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    answer = await client.get("/v1/models")
    server.close()

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/responses?x=%20y"),
        ("GET", "/v1/files/abc%2Fdef"),
        ("DELETE", "/v1/files/abc"),
        ("PUT", "/v1/a/b/c"),
        ("PATCH", "/v1/a"),
        ("GET", "/v1/chat/completions/stored"),
        ("GET", "/v1/chat/completions"),
    ],
)
async def test_other_endpoints_are_relayed(stage: Stage, method: str, path: str) -> None:
    """Method, path, query, status and body are unchanged; nothing comes from the cache."""
    raw = await stage.raw(saying(json_reply(b'{"x": 1}', b"X-Theirs: 1", status=b"201 Made")))
    client = await stage.gateway(raw)
    body = b'{"model":"mock"}' if method in ("POST", "PUT", "PATCH") else None
    answers = [await client.send(method, path, body) for _ in range(2)]

    assert {(a.status, a.body, a.headers["X-Theirs"], a.cache) for a in answers} == {(201, b'{"x": 1}', "1", "bypass")}
    assert answers[0].cache_status.fwd == "bypass"
    assert [(c.request_line, c.body) for c in raw.connections] == [(f"{method} {path} HTTP/1.1", body or b"")] * 2


@pytest.mark.parametrize(("method", "length"), [("POST", b"0"), ("PUT", b"0"), ("GET", None), ("DELETE", None)])
async def test_a_request_without_a_body_says_so_where_one_is_expected(
    stage: Stage, method: str, length: bytes | None
) -> None:
    """RFC 9110, section 8.6: some servers answer 411 to a POST without it."""
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
    """204 is relayed as 204."""
    raw = await stage.raw(saying(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n"))
    client = await stage.gateway(raw)
    answer = await client.send("DELETE", "/v1/files/abc")

    assert (answer.status, answer.body) == (204, b"")
    assert "Transfer-Encoding" not in answer.headers


async def test_a_relayed_stream_is_not_gathered_up(stage: Stage) -> None:
    """Streams of other endpoints are relayed piece by piece."""
    go_on = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM + b"data: 1\n\n")
        await go_on.wait()
        await connection.send(b"data: 2\n\n")

    client = await stage.gateway(await stage.raw(converse))
    async with client.stream({"model": "mock", "stream": True}, "/v1/responses") as stream:
        assert await stream.event() == b"1"
        go_on.set()
        assert await stream.rest() == [b"2"]


async def test_a_relayed_answer_that_breaks_off_does_not_look_whole(stage: Stage) -> None:
    """The client's connection breaks, too."""
    raw = await stage.raw(saying(CHUNKED_EVENT_STREAM + chunked(b"data: 1\n\n")))
    client = await stage.gateway(raw)
    body = b'{"model":"mock"}'
    async with wire(client) as connection:
        await connection.send(request_bytes(body, path=b"/v1/responses"))
        async with asyncio.timeout(DEADLINE):
            said = await connection.reader.read()

    assert b"data: 1" in said
    assert not said.endswith(b"0\r\n\r\n")


async def test_a_client_that_leaves_ends_a_relayed_call(stage: Stage) -> None:
    """A relayed call has no other clients."""
    began, ended = asyncio.Event(), asyncio.Event()

    async def converse(connection: Connection) -> None:
        began.set()
        await connection.closed()
        ended.set()

    client = await stage.gateway(await stage.raw(converse))
    asking = asyncio.create_task(client.post({"model": "mock"}, "/v1/embeddings"))
    async with asyncio.timeout(DEADLINE):
        await began.wait()
        asking.cancel()
        await ended.wait()


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
    """A client cannot reach other paths of the upstream's host."""
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
    """It may have /v1 or not, a prefix, and a trailing slash."""
    raw = await stage.raw(saying(json_reply(ANSWER)))
    root = raw.url.removesuffix("/v1")
    for base, prefix in (("", "/v1"), ("/", "/v1"), ("/v1", "/v1"), ("/v1/", "/v1"), ("/openai/v2", "/openai/v2")):
        client = await stage.gateway(root + base)
        await client.post(chat())
        assert raw.connections[-1].request_line == f"POST {prefix}/chat/completions HTTP/1.1"


async def test_ready_when_an_upstream_can_be_reached(stage: Stage) -> None:
    """/health is 200 while the process runs; /ready, if a miss can be answered."""
    url = nothing_listens()
    client = await stage.gateway(url)
    await client.gateway.router.refresh()
    assert ((await client.get("/health")).status, (await client.get("/ready")).status) == (200, 503)

    client = await stage.gateway(url, await stage.mock())
    await client.gateway.router.refresh()
    assert ((await client.get("/health")).status, (await client.get("/ready")).status) == (200, 200)


async def test_a_dead_upstream_holds_up_nothing_that_others_can_do(stage: Stage) -> None:
    """Requests without a model, or with an unlisted one, go to an upstream that answers."""
    mock = await stage.mock()
    for upstreams in ((nothing_listens(), mock), (mock, nothing_listens())):
        client = await stage.gateway(*upstreams)
        await client.gateway.router.refresh()
        answers = [
            await client.get("/v1/models"),
            await client.post({"input": "x"}, "/v1/embeddings"),
            await client.post(chat(model="alias")),
        ]
        assert [answer.status for answer in answers] == [200, 200, 200]


async def test_a_request_that_was_read_is_sent_to_no_other_upstream(stage: Stage) -> None:
    """A request that makes servers close reaches one of them only, and the gateway stays ready."""

    async def converse(connection: Connection) -> None:
        connection.cut()

    raws = [await stage.raw(converse) for _ in range(3)]
    client = await stage.gateway(*raws)
    await client.gateway.router.refresh()
    answer = await client.post(chat())

    assert (answer.status, answer.error["code"]) == (502, "upstream_cut")
    assert sum(len(raw.connections) for raw in raws) == 1
    assert (await client.get("/ready")).status == 200


async def test_an_upstream_that_does_not_list_its_models_holds_up_no_list(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GET /v1/models shows the others' models."""
    monkeypatch.setattr("gateway.api.handlers._LIST_DEADLINE", 0.3)
    mock = await stage.mock()
    # Connections are made, and never accepted.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = await stage.gateway(f"http://127.0.0.1:{silent.getsockname()[1]}", mock)
        answer = await client.get("/v1/models")

    assert [model["id"] for model in answer.json["data"]] == ["mock"]


async def test_other_endpoints_go_where_their_model_is(stage: Stage) -> None:
    """The body's model selects the upstream, for embeddings as for chats."""
    chats, embeddings = await stage.mock(models=("chat",)), await stage.mock(models=("embed",))
    client = await stage.gateway(chats, embeddings)
    await client.gateway.router.refresh()
    for _ in range(4):
        await client.post({"model": "embed", "input": "x"}, "/v1/embeddings")

    assert (len(chats.received), len(embeddings.received)) == (0, 4)


async def test_an_absolute_target_is_the_same_target(stage: Stage) -> None:
    """Servers accept the absolute form of a target (RFC 9112, section 3.2.2)."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with wire(client) as connection:
        await connection.send(request_bytes(b"{}", path=b"http://gateway/v1/files?x=1"))
        assert (await connection.answer()).status == 200

    assert [received.path for received in mock.received] == ["/v1/files"]


async def test_a_plain_answer_too_long_to_hold_is_passed_on_in_pieces(stage: Stage) -> None:
    """It reaches its client completely, and is not stored."""
    body = msgspec.json.encode({"choices": [{"message": {"content": "x" * 3_000_000}, "finish_reason": "stop"}]})

    async def converse(connection: Connection) -> None:
        await connection.send(json_reply(body))

    raw = await stage.raw(converse)
    client = await stage.gateway(raw, cache={"max_answer": 2**20})
    answers = [await client.post(chat()) for _ in range(2)]

    assert [answer.body == body for answer in answers] == [True, True]
    assert [answer.cache for answer in answers] == ["miss", "miss"]


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/chat/completions"])
async def test_a_client_that_does_not_read_is_cut_off(stage: Stage, path: str) -> None:
    """After timeouts.client its upstream call is cancelled, for any kind of answer."""
    gone = asyncio.Event()

    async def converse(connection: Connection) -> None:
        try:
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
            while True:
                await connection.send(b"x" * 65_536)
        except ConnectionError:
            gone.set()

    client = await stage.gateway(await stage.raw(converse), timeouts={"client": 0.3}, cache={"max_answer": 2**20})
    async with wire(client) as connection:
        await connection.send(request_bytes(msgspec.json.encode(chat()), path=path.encode()))
        async with asyncio.timeout(DEADLINE):
            await gone.wait()


async def send_until_it_breaks(connection: Wire) -> None:
    """Sends line breaks, which HTTP allows between requests, to detect the end of a connection."""
    async with asyncio.timeout(DEADLINE):
        while True:
            await connection.send(b"\r\n")
            await asyncio.sleep(0.05)


async def test_a_client_that_does_not_read_a_hit_is_cut_off(stage: Stage) -> None:
    """Such a client holds an answer's memory for timeouts.client at most."""
    mock = await stage.mock(Reply(text="x" * 4_000_000))
    client = await stage.gateway(mock, timeouts={"client": 0.5})
    assert (await client.post(chat())).cache == "miss"
    async with wire(client, receive_buffer=4096) as connection:
        await connection.send(request_bytes(msgspec.json.encode(chat())))
        with pytest.raises(ConnectionError):
            await send_until_it_breaks(connection)


@pytest.mark.parametrize("status", [b"000 Nothing", b"101 Switching Protocols"])
async def test_a_status_that_no_answer_has_is_a_bad_gateway(stage: Stage, status: bytes) -> None:
    """Clients get a 502, not an invalid status line."""
    raw = await stage.raw(saying(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n"))
    client = await stage.gateway(raw)
    answer = await client.post(chat())

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")
