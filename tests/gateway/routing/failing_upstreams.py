"""What upstreams do wrong, as conversations of a RawUpstream."""

import asyncio

from gateway.settings.upstreams import ModelSettings, RetrySettings, RoutingSettings, UpstreamSettings
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, Connection, Conversation, chunked, json_reply
from tests.gateway.upstreams.upstream_examples import ANSWER

EVENTS = [
    b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant","content":"ok"}}]}\n\n',
    b'data: {"object":"chat.completion.chunk","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
]

QUICK = RetrySettings(attempts=2, first_pause=0.01, longest_pause=0.2)
"""Retries without long pauses."""


def named(url: str, name: str, **settings: object) -> UpstreamSettings:
    return UpstreamSettings(url=url, name=name, **settings)  # type: ignore[arg-type]  # of any field


def first(name: str, model: str = "mock", fallbacks: tuple[str, ...] = ()) -> RoutingSettings:
    """Every request for the model goes to this upstream before others."""
    return RoutingSettings(models={model: ModelSettings(canary={name: 1.0}, fallbacks=fallbacks)})


async def resets(connection: Connection) -> None:
    connection.cut()


async def hangs(connection: Connection) -> None:
    await connection.closed()


def is_stream(connection: Connection) -> bool:
    return b'"stream":true' in connection.body


async def hangs_after_its_status(connection: Connection) -> None:
    """For a stream before its first event, else within the body."""
    await connection.send(CHUNKED_EVENT_STREAM if is_stream(connection) else json_reply(ANSWER)[:-5])
    await connection.closed()


async def hangs_within(connection: Connection) -> None:
    """After the first event of a stream."""
    await connection.send(
        CHUNKED_EVENT_STREAM + chunked(EVENTS[0]) if is_stream(connection) else json_reply(ANSWER)[:-5]
    )
    await connection.closed()


async def cuts_before_the_first_event(connection: Connection) -> None:
    await connection.send(CHUNKED_EVENT_STREAM if is_stream(connection) else json_reply(ANSWER)[:-5])
    await asyncio.sleep(0.01)
    connection.cut()


async def cuts_within(connection: Connection) -> None:
    await connection.send(
        CHUNKED_EVENT_STREAM + chunked(EVENTS[0]) if is_stream(connection) else json_reply(ANSWER)[:-5]
    )
    await asyncio.sleep(0.01)
    connection.cut()


async def is_well(connection: Connection) -> None:
    if is_stream(connection):
        await connection.send(CHUNKED_EVENT_STREAM + b"".join(map(chunked, (*EVENTS, b""))))
    else:
        await connection.send(json_reply(ANSWER))


async def says_noise_within(connection: Connection) -> None:
    """After the first event of a stream."""
    await connection.send(
        CHUNKED_EVENT_STREAM + chunked(EVENTS[0]) if is_stream(connection) else json_reply(ANSWER)[:-5]
    )
    await asyncio.sleep(0.01)
    await connection.send(chunked(NOISE) + chunked(b"") if is_stream(connection) else NOISE[:5])


def says(reply: bytes) -> Conversation:
    async def converse(connection: Connection) -> None:
        await connection.send(reply)

    return converse


def refuses(status: bytes, *headers: bytes) -> Conversation:
    """An error in OpenAI's form."""
    return says(json_reply(b'{"error":{"message":"no","type":"x","param":null,"code":"y"}}', *headers, status=status))


HTML = b"<html><body>Welcome to nginx!</body></html>"
WEB_PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: %d\r\n\r\n%s" % (
    len(HTML),
    HTML,
)
NO_JSON = json_reply(b'{"choices": [{"index": 0, "mess')
NOISE = b"\x00\xfe{]\n\n<<<>>>\r\n\r\n" * 20
NOISE_AS_EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + NOISE
NOTHING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


async def says_an_error_with_200(connection: Connection) -> None:
    error = b'{"error": {"message": "overloaded", "type": "x", "param": null, "code": "y"}}'
    if is_stream(connection):
        await connection.send(CHUNKED_EVENT_STREAM + chunked(b"data: " + error + b"\n\n") + chunked(b""))
    else:
        await connection.send(json_reply(error))
