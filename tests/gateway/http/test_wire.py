"""Requests that are cut, joined and repeated on a connection each get their own answer, in order."""

import asyncio
import random
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.upstreams.mock import Reply
from tests.gateway.client import DEADLINE, Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import chunked
from tests.gateway.wire import Wire, request_bytes, wire
from tests.waiting import until_steady

QUESTIONS = ["red", "green", "blue"]


def ask(question: str, *headers: bytes, **fields: Any) -> bytes:
    """A request as bytes; the answer repeats the question."""
    return request_bytes(msgspec.json.encode(chat(question, **fields)), *headers)


def in_chunks(question: str) -> bytes:
    body = msgspec.json.encode(chat(question))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunked(body[:30]) + chunked(body[30:]) + chunked(b"")


# Requests, and the expected answers.
REQUESTS: list[tuple[bytes, str]] = [
    *((ask(question), question) for question in QUESTIONS),
    *((ask(question, stream=True), question) for question in QUESTIONS),
    (ask("red", b"Authorization: Bearer a"), "red"),
    (ask("red", b"Authorization: Bearer b"), "red"),
    (ask("red", b"Cache-Control: max-age=60"), "red"),
    (ask("red", b"Cache-Control: no-store"), "red"),
    (in_chunks("green"), "green"),
    # A body that looks like a request.
    (ask(ask("red").decode()), ask("red").decode()),
    (b"GET /health HTTP/1.1\r\nHost: gateway\r\n\r\n", "health"),
    (b"GET /nowhere HTTP/1.1\r\nHost: gateway\r\n\r\n", "404"),
    (request_bytes(b"{"), "400"),
]


def said(answer: Answer) -> str:
    if answer.status != 200:
        return str(answer.status)
    return "health" if answer.body == b'{"status":"ok"}' else answer.text


@pytest.fixture
async def client(stage: Stage) -> Client:
    client = await stage.gateway(await stage.mock())
    # On the fast path from the start: each request was answered often enough to be found by its bytes.
    async with wire(client) as connection:
        for _ in range(3):
            for request, expected in REQUESTS:
                await connection.send(request)
                assert said(await connection.answer()) == expected
    return client


async def test_a_repeated_request_on_one_connection_is_a_hit_each_time(client: Client) -> None:
    """A repeated request on one connection has the headers of a hit and is counted as one."""
    before = await client.figure("requests_total", cache="hit")
    async with wire(client) as connection:
        answers: list[Answer] = []
        for _ in range(20):
            await connection.send(ask("red"))
            answers.append(await connection.answer())

    assert {(answer.status, answer.cache, answer.text) for answer in answers} == {(200, "hit", "red")}
    assert all(answer.cache_status.hit and int(answer.headers["Age"]) < 60 for answer in answers)
    assert all("Date" in answer.headers for answer in answers)
    assert len({frozenset(answer.headers) for answer in answers}) == 1
    assert await client.figure("requests_total", cache="hit") - before == 20


async def test_a_body_that_is_a_request_is_not_answered_as_one(client: Client) -> None:
    """A body with the bytes of a cached request is read as a body, for any cuts."""
    hot = ask("red")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: %d\r\n\r\n" % len(hot)
    async with wire(client) as connection:
        for _ in range(5):
            await connection.send(ask("red"))
            assert (await connection.answer()).text == "red"
            await connection.send(head)
            await asyncio.sleep(0.01)  # so that the gateway reads them separately
            await connection.send(hot)
            assert (await connection.answer()).status == 400


@pytest.mark.parametrize("chunks", [2, 3, 7])
async def test_a_request_in_pieces_is_one_request(client: Client, chunks: int) -> None:
    """A request that arrives in pieces is answered once, also on the fast path."""
    rng = random.Random(chunks)  # noqa: S311  # not a secret
    async with wire(client) as connection:
        for _ in range(20):
            request = ask("green")
            cuts = sorted(rng.sample(range(1, len(request)), chunks - 1))
            for start, end in zip([0, *cuts], [*cuts, len(request)], strict=True):
                await connection.send(request[start:end])
                await asyncio.sleep(0.001)  # so that the gateway reads them separately
            assert (await connection.answer()).text == "green"
            await connection.send(ask("blue"))
            assert (await connection.answer()).text == "blue"


async def test_a_purge_takes_effect_between_hits_of_one_connection(client: Client) -> None:
    """A purge takes effect between two hits of one connection."""
    async with wire(client) as connection:
        for _ in range(3):
            await connection.send(ask("red"))
            assert (await connection.answer()).cache == "hit"
        await client.send("DELETE", "/v1/cache")
        await connection.send(ask("red"))
        assert (await connection.answer()).cache == "miss"
        await connection.send(ask("red"))
        assert (await connection.answer()).cache == "hit"


async def test_a_connection_serves_the_newest_answer(stage: Stage) -> None:
    """A connection that served an old answer serves the new one after a no-cache request."""
    mock = await stage.mock(Reply(text="old"))
    client = await stage.gateway(mock)
    async with wire(client) as connection:
        for _ in range(4):
            await connection.send(ask("red"))
            assert (await connection.answer()).text == "old"
        mock.replies[:] = [Reply(text="new")]
        assert (await client.post(chat("red"), Cache_Control="no-cache")).text == "new"
        for _ in range(4):
            await connection.send(ask("red"))
            assert (await connection.answer()).text == "new"


async def test_answers_to_a_client_that_does_not_read_are_bounded(client: Client) -> None:
    """The gateway stops reading requests of a client that reads no answers."""
    request = ask("red")
    sent = 0
    async with wire(client, receive_buffer=2**14) as connection:
        for _ in range(3):
            await connection.send(request)
            await connection.answer()

        async def pour() -> None:
            nonlocal sent
            while True:
                await connection.send(request * 50)
                sent += 50

        # The test reads nothing: answers fill the sockets' buffers, and then the gateway stops reading.
        connection.reader._transport.pause_reading()  # type: ignore[attr-defined]  # asyncio has no public way
        pouring = asyncio.create_task(pour())
        await until_steady(lambda: sent)
        pouring.cancel()

    assert sent < 200_000


# Any mix of requests, cut and joined in any way


class Speaker:
    """Writes requests and reads the answers meanwhile."""

    def __init__(self, connection: Wire) -> None:
        self._connection = connection

    async def say(self, data: bytes, cuts: list[int], pauses: list[bool]) -> None:
        borders = sorted({cut % len(data) for cut in cuts} | {0})
        for number, (start, end) in enumerate(zip(borders, [*borders[1:], len(data)], strict=True)):
            await self._connection.send(data[start:end])
            if pauses[number % len(pauses)]:
                await asyncio.sleep(0.002)  # so that the gateway reads them separately


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.lists(
        st.tuples(
            st.lists(st.sampled_from(range(len(REQUESTS))), min_size=1, max_size=4),
            st.lists(st.integers(0, 4000), max_size=4),
            st.lists(st.booleans(), min_size=1, max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
async def test_every_request_gets_its_own_answer_in_order(
    client: Client, groups: list[tuple[list[int], list[int], list[bool]]]
) -> None:
    """Requests that are pipelined, cut or joined get their own answers in order."""
    async with wire(client) as connection:
        speaker = Speaker(connection)
        for numbers, cuts, pauses in groups:
            await speaker.say(b"".join(REQUESTS[number][0] for number in numbers), cuts, pauses)
            for number in numbers:
                assert said(await connection.answer()) == REQUESTS[number][1]
        async with asyncio.timeout(DEADLINE):
            connection.writer.write_eof()
            assert await connection.reader.read() == b""
