"""A second upstream is asked where the first one takes long."""

import asyncio

from gateway.settings.upstreams import HedgeSettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import DEADLINE, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, RawUpstream
from tests.gateway.routing.failing_upstreams import first, hangs, is_stream, is_well, named, resets
from tests.waiting import until

HEDGING = HedgeSettings(after=0.05, share=1.0)


def hanging_until_closed(closed: asyncio.Event) -> RawUpstream:
    async def converse(connection: Connection) -> None:
        await connection.closed()
        closed.set()

    return RawUpstream(converse)


async def test_the_first_answer_counts_and_the_other_call_is_cancelled(stage: Stage) -> None:
    """One of the two answers, whole or streamed; the slow upstream sees that its connection is closed."""
    for stream in (False, True):
        closed = asyncio.Event()
        slow = await stage.raw(hanging_until_closed(closed).conversation)
        well = await stage.mock(Reply(text="right"))
        servers = named(slow.url, "slow"), named(well.url, "well")
        client = await stage.gateway(*servers, hedging=HEDGING, routing=first("slow"))
        await client.gateway.router.refresh()
        hedged = await client.figure("hedged_requests_total")
        answer = await client.post(chat(stream=stream))

        assert (answer.status, answer.text, len(slow.connections), len(well.received)) == (200, "right", 1, 1)
        async with asyncio.timeout(DEADLINE):
            await closed.wait()
        assert await client.figure("hedged_requests_total") == hedged + 1
        assert [upstream.in_flight for upstream in client.gateway.router.upstreams] == [0, 0]
        assert client.gateway.router.upstreams[0].latency > 0.04, "it does not seem quick"
        assert (await client.post(chat(stream=stream))).cache == "hit"


async def test_the_slower_upstream_may_still_be_first(stage: Stage) -> None:
    """The call to the second one is cancelled when the first one answers after all."""
    go_on, closed = asyncio.Event(), asyncio.Event()

    async def converse(connection: Connection) -> None:
        await go_on.wait()
        await is_well(connection)

    slow, hanging = await stage.raw(converse), await stage.raw(hanging_until_closed(closed).conversation)
    servers = named(slow.url, "slow"), named(hanging.url, "hanging")
    client = await stage.gateway(*servers, hedging=HEDGING, routing=first("slow"))
    await client.gateway.router.refresh()
    asking = asyncio.create_task(client.post(chat()))
    await until(lambda: len(hanging.connections) == 1)
    go_on.set()

    assert (await asking).text == "ok"
    async with asyncio.timeout(DEADLINE):
        await closed.wait()


async def test_an_upstream_that_is_quick_is_asked_alone(stage: Stage) -> None:
    """Neither a quick answer nor a quick failure is hedged, and a failure is tried elsewhere as always."""
    for conversation in (is_well, resets):
        quick, other = await stage.raw(conversation), await stage.raw(is_well)
        servers = named(quick.url, "quick"), named(other.url, "other")
        client = await stage.gateway(*servers, hedging=HedgeSettings(after=5.0, share=1.0), routing=first("quick"))
        await client.gateway.router.refresh()
        hedged = await client.figure("hedged_requests_total")
        answer = await client.post(chat())
        assert answer.status == (200 if conversation is is_well else 502)  # tests send a request once
        assert len(other.connections) == 0
        assert await client.figure("hedged_requests_total") == hedged


async def test_few_requests_are_hedged(stage: Stage) -> None:
    """With a share of a twentieth two of forty slow requests are sent twice."""
    go_on = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await go_on.wait()
        await is_well(connection)

    slow, other = await stage.raw(converse), await stage.raw(converse)
    servers = named(slow.url, "slow"), named(other.url, "other")
    hedging = HedgeSettings(after=0.02, share=0.05)
    client = await stage.gateway(*servers, hedging=hedging, routing=first("slow"))
    await client.gateway.router.refresh()
    asking = [asyncio.create_task(client.post(chat(f"{number}"))) for number in range(40)]
    await until(lambda: len(slow.connections) == 40)
    # The last one has been waited for since before its connection: its hedge would be due within this time.
    await asyncio.sleep(10 * hedging.after)
    go_on.set()
    answers = await asyncio.gather(*asking)

    assert {answer.status for answer in answers} == {200}
    assert (len(slow.connections), len(other.connections)) == (40, 2)


async def test_no_upstream_that_is_full_or_down_is_hedged_to(stage: Stage) -> None:
    """A hedge must not wait for others, nor delay them."""
    slow, full = await stage.raw(hangs), await stage.raw(hangs)
    servers = named(slow.url, "slow"), named(full.url, "full", max_requests=1)
    client = await stage.gateway(*servers, hedging=HEDGING, routing=first("slow"), timeouts={"first_byte": 1.0})
    await client.gateway.router.refresh()
    hedged = asyncio.create_task(client.post(chat("hedged")))
    await until(lambda: len(full.connections) == 1)
    answers = await asyncio.gather(*(client.post(chat(f"{number}")) for number in range(3)), hedged)

    assert {answer.status for answer in answers} == {504}
    assert len(full.connections) == 1


async def test_two_failures_are_one_error(stage: Stage) -> None:
    """When both fail, a third upstream is not asked, as the request may be at fault; the error names both."""

    async def breaks(connection: Connection) -> None:
        await asyncio.sleep(0.2)
        connection.cut()

    raws = [await stage.raw(breaks) for _ in range(3)]
    servers = [named(raw.url, f"up-{number}") for number, raw in enumerate(raws)]
    client = await stage.gateway(*servers, hedging=HEDGING)
    await client.gateway.router.refresh()
    answer = await client.post(chat())

    assert (answer.status, answer.error["code"]) == (502, "upstream_cut")
    assert sum(f"up-{number} " in answer.error["message"] for number in range(3)) == 2
    assert sum(len(raw.connections) for raw in raws) == 2


async def test_a_client_that_leaves_ends_both_calls(stage: Stage) -> None:
    """Nothing of a hedged request stays when its client has gone."""
    gone = [asyncio.Event(), asyncio.Event()]
    raws = [await stage.raw(hanging_until_closed(event).conversation) for event in gone]
    client = await stage.gateway(*raws, hedging=HEDGING)
    await client.gateway.router.refresh()
    asking = asyncio.create_task(client.post(chat()))
    await until(lambda: all(raw.connections for raw in raws))
    asking.cancel()
    async with asyncio.timeout(DEADLINE):
        for event in gone:
            await event.wait()
    await client.until("flights", 0)
    assert [upstream.in_flight for upstream in client.gateway.router.upstreams] == [0, 0]


async def test_streams_are_hedged_until_their_first_event(stage: Stage) -> None:
    """An upstream that has sent its status alone has not begun."""

    async def begins(connection: Connection) -> None:
        assert is_stream(connection)
        await connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        await connection.closed()

    slow, well = await stage.raw(begins), await stage.mock(Reply(text="right"))
    servers = named(slow.url, "slow"), named(well.url, "well")
    client = await stage.gateway(*servers, hedging=HEDGING, routing=first("slow"))
    await client.gateway.router.refresh()
    assert (await client.post(chat(stream=True))).text == "right"
