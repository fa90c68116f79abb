"""The deadline of a request holds for all that is done for it, and is passed on."""

import asyncio
import json
import time

import pytest

from gateway.settings.upstreams import RetrySettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import DEADLINE, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import EVENT_STREAM, Connection
from tests.gateway.routing.failing_upstreams import EVENTS, QUICK, hangs, is_well, named, refuses
from tests.waiting import until

MUCH_LATER = 3.0
"""Seconds after which a deadline of a fifth of a second was not kept, on a busy machine as well."""


def told(connection: Connection) -> float | None:
    """The seconds in the header that the upstream got."""
    for line in connection.head.split(b"\r\n"):
        name, _, value = line.partition(b": ")
        if name.lower() == b"x-request-timeout":
            return float(value)
    return None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_ends_at_its_deadline(stage: Stage, stream: bool) -> None:
    """An upstream that does not answer is given up, and the connection to it is closed."""
    closed = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await connection.closed()
        closed.set()

    client = await stage.gateway(await stage.raw(converse), await stage.raw(converse), retries=QUICK)
    began = time.monotonic()
    answer = await client.post(chat(stream=stream), x_request_timeout="0.2")

    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert "deadline" in answer.error["message"]
    assert 0.2 <= time.monotonic() - began < MUCH_LATER
    async with asyncio.timeout(DEADLINE):
        await closed.wait()


async def test_a_stream_ends_at_its_deadline(stage: Stage) -> None:
    """An answer that has begun ends in an error event."""

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM + EVENTS[0])
        await connection.closed()

    client = await stage.gateway(await stage.raw(converse))
    began = time.monotonic()
    answer = await client.post(chat(stream=True), x_request_timeout="0.2")

    assert json.loads(answer.events[-1])["error"]["code"] == "upstream_timeout"
    assert time.monotonic() - began < MUCH_LATER


async def test_what_is_left_of_a_deadline_is_passed_on(stage: Stage) -> None:
    """Each try hears of the seconds that are left for it; without a client's deadline no upstream hears of one."""
    busy = await stage.raw(refuses(b"429 Too Many Requests", b"Retry-After: 0.1"))
    client = await stage.gateway(busy, retries=QUICK)
    await client.post(chat(), x_request_timeout="30")
    first, second, third = (told(connection) for connection in busy.connections)

    assert first is not None
    assert second is not None
    assert third is not None
    assert 30 >= first >= second + 0.1 >= third + 0.2 > 20

    well = await stage.raw(is_well)
    client = await stage.gateway(well, timeouts={"total": 20.0})
    await client.post(chat())
    await client.post(chat("again"), x_request_timeout="30")
    assert told(well.connections[0]) is None
    assert 10 < (told(well.connections[1]) or 0) <= 20, "the setting is the longest"


async def test_the_longest_time_of_the_settings_holds_for_all(stage: Stage) -> None:
    """A request without a deadline has that of `timeouts.total`."""
    client = await stage.gateway(await stage.raw(hangs), timeouts={"total": 0.2})
    began = time.monotonic()
    answer = await client.post(chat())

    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert time.monotonic() - began < MUCH_LATER


async def test_no_pause_is_longer_than_the_deadline(stage: Stage) -> None:
    """An upstream that is busy for longer is not waited for."""
    busy = await stage.raw(refuses(b"429 Too Many Requests", b"Retry-After: 5"))
    client = await stage.gateway(busy, retries=RetrySettings(attempts=3, longest_pause=60.0))
    began = time.monotonic()
    answer = await client.post(chat(), x_request_timeout="2")

    assert (answer.status, answer.headers["Retry-After"], len(busy.connections)) == (429, "5", 1)
    assert time.monotonic() - began < 2


async def test_a_deadline_ends_the_wait_in_a_queue(stage: Stage) -> None:
    """A request that waits for its turn leaves the queue, and its slot is another one's."""
    mock = await stage.mock(Reply(text="ok"))
    client = await stage.gateway(named(mock.url, "one", max_requests=1))
    mock.hold.clear()
    first = asyncio.create_task(client.post(chat("first")))
    await mock.wait_for(1)
    answer = await client.post(chat("second"), x_request_timeout="0.1")
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert "queue" in answer.error["message"]
    mock.hold.set()

    assert (await first).status == 200
    assert (await client.post(chat("third"))).status == 200
    assert len(mock.received) == 2


async def test_a_deadline_in_one_queue_counts_more_than_another_that_is_full(stage: Stage) -> None:
    """The client hears that its time was over, and not when it may come back."""
    mock = await stage.mock()
    client = await stage.gateway(
        named(mock.url, "small", max_requests=1, max_waiting=0), named(mock.url, "large", max_requests=1)
    )
    await client.gateway.router.refresh()
    mock.hold.clear()
    asking = [asyncio.create_task(client.post(chat(f"{number}"))) for number in range(3)]
    slots = [upstream.slots for upstream in client.gateway.router.upstreams]
    await until(lambda: [each.taken for each in slots] == [1, 1] and slots[1].waiting == 1)
    answer = await client.post(chat(), x_request_timeout="0.1")
    assert (answer.status, answer.error["code"]) == (504, "upstream_timeout")
    assert "small has 1 requests under way" in answer.error["message"]
    mock.hold.set()
    assert [answer.status for answer in await asyncio.gather(*asking)] == [200] * 3


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e9", ""])
async def test_a_deadline_that_is_no_time_is_refused(stage: Stage, value: str) -> None:
    """The error names the header."""
    client = await stage.gateway(await stage.mock())
    answer = await client.post(chat(), x_request_timeout=value)
    assert answer.status == 400
    assert "x-request-timeout" in answer.error["message"]
