"""Time limits for upstreams that do not answer and for clients that do not read."""

import asyncio
import json
import socket

import msgspec
import pytest

from gateway.upstreams.mock import Reply
from tests.gateway.client import DEADLINE, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import EVENT_STREAM, Connection, json_reply
from tests.gateway.upstreams.upstream_examples import ANSWER, EVENTS
from tests.gateway.wire import Wire, request_bytes, wire


async def hang(connection: Connection) -> None:
    """Send nothing until the gateway closes."""
    await connection.closed()


async def test_a_connection_that_is_never_accepted_is_given_up(stage: Stage) -> None:
    """A connection fails after timeouts.connect if the host neither accepts nor refuses it."""
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
    """An answer that does not begin within timeouts.first_byte gives 504, and its call is cancelled."""
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
    """A plain answer without a byte for timeouts.idle gives 504."""

    async def converse(connection: Connection) -> None:
        await connection.send(json_reply(ANSWER)[:-5])
        await hang(connection)

    client = await stage.gateway(await stage.raw(converse), timeouts={"idle": 0.15})
    answer = await client.post(chat())

    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")


async def test_a_stream_that_stalls_ends_in_an_error_event(stage: Stage) -> None:
    """A stream without a byte for timeouts.idle ends in an error event after its earlier events."""

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM + EVENTS[0])
        await hang(connection)

    client = await stage.gateway(await stage.raw(converse), timeouts={"idle": 0.15})
    answer = await client.post(chat(stream=True))

    assert answer.body.startswith(EVENTS[0])
    assert json.loads(answer.events[1])["error"]["code"] == "upstream_timeout"
    assert b"[DONE]" not in answer.body


async def test_a_slow_answer_that_keeps_coming_is_not_given_up(stage: Stage) -> None:
    """An answer that keeps coming may take many times timeouts.idle."""
    mock = await stage.mock(Reply(text="word " * 60, pause=0.06))
    client = await stage.gateway(mock, timeouts={"idle": 0.5, "first_byte": 0.5})
    answer = await client.post(chat(stream=True))

    assert answer.text == "word " * 60


async def test_a_pause_of_the_client_does_not_count_as_idle_time(stage: Stage) -> None:
    """The time that a client does not read is no idle time of the upstream."""

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


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/chat/completions"])
async def test_a_client_that_does_not_read_is_disconnected(stage: Stage, path: str) -> None:
    """A client that does not read is disconnected after timeouts.client, and its call is cancelled."""
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


async def test_a_client_that_does_not_read_a_hit_is_disconnected(stage: Stage) -> None:
    """A client that does not read a hit is disconnected after timeouts.client."""
    mock = await stage.mock(Reply(text="x" * 4_000_000))
    client = await stage.gateway(mock, timeouts={"client": 0.5})
    assert (await client.post(chat())).cache == "miss"
    async with wire(client, receive_buffer=4096) as connection:
        await connection.send(request_bytes(msgspec.json.encode(chat())))
        with pytest.raises(ConnectionError):
            await send_until_it_breaks(connection)
