"""What a request cost is said with its answer: in headers, or after the body of a stream."""

import asyncio

import msgspec
import pytest

from gateway.settings.operations import CostSettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.surfaces.dialects import Messages, Question
from tests.gateway.wire import Wire, request_bytes, wire

# A dollar for each word; both questions have two, and each answer repeats its question.
PRICES = {"mock": {"input": 1e6, "output": 1e6}}
READS_TRAILERS = b"TE: trailers"


async def priced(stage: Stage, *replies: Reply) -> Client:
    costs = msgspec.convert({"prices": PRICES}, CostSettings)
    return await stage.gateway(await stage.mock(*replies), costs=costs)


def streamed(question: str, *headers: bytes) -> bytes:
    body = chat(question, stream=True, stream_options={"include_usage": True})
    return request_bytes(msgspec.json.encode(body), *headers)


async def ask(connection: Wire, data: bytes) -> dict[str, str]:
    """The headers and the trailers of the answer."""
    await connection.send(data)
    answer = await connection.answer()
    assert answer.status == 200
    return {name.lower(): value for name, value in answer.headers.items()}


async def test_the_cost_of_a_stream_follows_it(stage: Stage) -> None:
    """A client that reads trailers is told what a streamed miss cost, and goes on with its connection."""
    client = await priced(stage)
    async with wire(client) as connection:
        missed = await ask(connection, streamed("one two", READS_TRAILERS))
        assert (missed["trailer"], missed["x-keepgate-cost"]) == ("x-keepgate-cost, x-keepgate-saving", "4")
        hit = await ask(connection, streamed("one two", READS_TRAILERS))
        assert (hit["x-keepgate-cost"], hit["x-keepgate-saving"]) == ("0", "4")
        assert "trailer" not in hit
        again = await ask(connection, streamed("three four", b"TE: gzip, Trailers"))
        assert again["x-keepgate-cost"] == "4"


async def test_the_cost_of_a_translated_stream_follows_it(stage: Stage) -> None:
    """Also where chunks are sent in another form of API."""
    client = await priced(stage)
    body = msgspec.json.encode(Messages().body(Question(), True) | {"model": "mock"})
    async with wire(client) as connection:
        answer = await ask(connection, request_bytes(body, READS_TRAILERS, path=b"/v1/messages"))
        assert float(answer["x-keepgate-cost"]) > 0


async def test_who_joins_a_stream_is_told_what_it_saved(stage: Stage) -> None:
    """The second of two identical streams cost nothing."""
    client = await priced(stage, Reply(pause=0.05))
    async with wire(client) as first, wire(client) as second:
        found = await asyncio.gather(*(ask(each, streamed("one two", READS_TRAILERS)) for each in (first, second)))
    assert sorted(each["x-keepgate-cost"] for each in found) == ["0", "4"]
    assert [each["x-keepgate-saving"] for each in found if "x-keepgate-saving" in each] == ["4"]


@pytest.mark.parametrize("te", [(), (b"TE: gzip",)], ids=["none", "another"])
async def test_other_clients_get_no_trailers(stage: Stage, te: tuple[bytes, ...]) -> None:
    """RFC 9110, section 6.5.1: only a client that says so can be trusted to read them."""
    client = await priced(stage)
    async with wire(client) as connection:
        answer = await ask(connection, streamed("one two", *te))
        assert "trailer" not in answer
        assert "x-keepgate-cost" not in answer
