"""Connections to an upstream that are refused, closed, reused or abandoned."""

import asyncio
import re
from typing import cast

import pytest

from gateway.upstreams.mock import MockUpstream
from tests.gateway.client import DEADLINE, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, json_reply, saying
from tests.gateway.upstreams.upstream_examples import ANSWER, nothing_listens
from tests.waiting import until


@pytest.mark.parametrize("stream", [False, True])
async def test_upstreams_that_cannot_be_reached_are_502(stage: Stage, stream: bool) -> None:
    """Unreachable upstreams give 502 in OpenAI's form with the name of each."""
    urls = [nothing_listens(), nothing_listens()]
    client = await stage.gateway(*urls)
    answer = await client.post(chat(stream=stream))

    assert (answer.status, answer.error["code"]) == (502, "upstream_unreachable")
    assert all(url.removeprefix("http://").removesuffix("/v1") in answer.error["message"] for url in urls)


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
    """An upstream that does not speak HTTP gives 502 in OpenAI's form."""
    raw = await stage.raw(saying(said))
    client = await stage.gateway(raw)
    answer = await client.post(chat(stream=stream))

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")
    raw.conversation = saying(json_reply(ANSWER))
    assert (await client.post(chat(stream=stream))).status == 200


@pytest.mark.parametrize("status", [b"000 Nothing", b"101 Switching Protocols"])
async def test_an_invalid_status_of_an_upstream_is_502(stage: Stage, status: bytes) -> None:
    """An upstream's invalid status line gives 502."""
    raw = await stage.raw(saying(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n"))
    client = await stage.gateway(raw)
    answer = await client.post(chat())

    assert (answer.status, answer.error["type"]) == (502, "upstream_error")


async def test_an_upstream_that_comes_back_is_used_again(stage: Stage) -> None:
    """An upstream that was restarted gets requests again."""
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
    """A request uses another connection when the upstream has closed a kept-alive one."""
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
    """A request gets a new connection when all kept-alive ones have ended."""
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
    await until(lambda: len(open_connections) >= 8, DEADLINE)
    answering.set()
    first = await asyncio.gather(*crowd)
    second = [await client.post(chat(f"again {number}")) for number in range(8)]
    server.close()

    assert {answer.status for answer in (*first, *second)} == {200}


async def test_a_request_that_was_read_is_not_sent_again(stage: Stage) -> None:
    """A request to an upstream that closes after reading it is not sent again."""

    async def converse(connection: Connection) -> None:
        connection.cut()

    raw = await stage.raw(converse)
    client = await stage.gateway(raw)
    answer = await client.post(chat())

    assert answer.status == 502
    assert len(raw.connections) == 1


async def test_a_request_whose_connection_ends_late_is_not_sent_twice(stage: Stage) -> None:
    """A request whose connection ends after it was sent gives an error, on a reused connection too."""
    requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            requests += head.startswith(b"POST /v1/chat")
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


async def test_unsent_data_for_a_frozen_upstream_is_dropped(stage: Stage) -> None:
    """The connection of a cancelled call is closed with its unsent data."""
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
async def test_extra_bytes_of_an_upstream_are_no_answer(stage: Stage, apart: bool) -> None:
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


async def test_a_client_that_leaves_ends_a_relayed_call(stage: Stage) -> None:
    """A relayed call is cancelled when its client disconnects."""
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
