"""Requests with deadlines that share a flight with others: each has its own deadline, and no other's."""

import asyncio
import time

from tests.cache.valkey import Valkey
from tests.gateway.client import chat
from tests.gateway.conftest import HASTY, Stage
from tests.gateway.raw_upstream import Connection, json_reply
from tests.waiting import until

ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"mock",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"late"},"finish_reason":"stop"}]}'
)
SHORT = 0.4


class Waiting:
    """Answers the first request when it is told to, and the others at once."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0

    async def __call__(self, connection: Connection) -> None:
        self.asked += 1
        if self.asked == 1:
            await self.go.wait()
        await connection.send(json_reply(ANSWER))


async def test_a_request_that_joins_keeps_its_own_deadline(stage: Stage) -> None:
    """A client with little time gets 504 at its deadline, and the one that it joined gets the answer."""
    conversation = Waiting()
    client = await stage.gateway(await stage.raw(conversation))
    patient = asyncio.create_task(client.post(chat()))
    await until(lambda: conversation.asked == 1)
    began = time.monotonic()
    hasty = await client.post(chat(), x_request_timeout=str(SHORT))
    assert (hasty.status, hasty.error["code"]) == (504, "upstream_timeout")
    assert SHORT <= time.monotonic() - began < SHORT + 0.5
    conversation.go.set()
    assert (await patient).text == "late"
    assert conversation.asked == 1


async def test_a_conversation_is_waited_for_until_the_deadline(stage: Stage, own_valkey: Valkey) -> None:
    """A request that continues a response ends at its deadline though Redis is away."""
    mock = await stage.mock()
    client = await stage.gateway(mock, redis=own_valkey.url, cache=HASTY)
    first = (await client.post({"model": "mock", "input": "hello"}, "/v1/responses")).json["id"]
    own_valkey.freeze()
    began = time.monotonic()
    body = {"model": "mock", "input": "again", "previous_response_id": first}
    refused = await client.post(body, "/v1/responses", x_request_timeout=str(SHORT))
    assert (refused.status, refused.error["code"]) == (504, "upstream_timeout")
    assert time.monotonic() - began < SHORT + 0.5


async def test_a_request_ends_at_no_other_ones_deadline(stage: Stage) -> None:
    """A client with time is answered though one with little time asked first, and was not."""
    conversation = Waiting()
    client = await stage.gateway(await stage.raw(conversation))
    hasty = asyncio.create_task(client.post(chat(), x_request_timeout=str(SHORT)))
    await until(lambda: conversation.asked == 1)
    patient = await client.post(chat())
    assert (patient.status, patient.text) == (200, "late")
    assert (await hasty).status == 504


async def test_requests_of_one_moment_share_a_flight(stage: Stage) -> None:
    """Those with the same timeout are computed once; one that comes much later is computed for itself."""
    conversation = Waiting()
    client = await stage.gateway(await stage.raw(conversation))
    first = [asyncio.create_task(client.post(chat(), x_request_timeout="10")) for _ in range(5)]
    await until(lambda: conversation.asked == 1)
    assert (await client.post(chat(), x_request_timeout="20")).text == "late"
    assert conversation.asked == 2
    conversation.go.set()
    assert [(await each).text for each in first] == ["late"] * 5
    assert conversation.asked == 2
