"""An upstream with a limit of requests, and the queue in front of it."""

import asyncio

from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.routing.failing_upstreams import first
from tests.waiting import until


def ask(client: Client, content: str, **headers: str) -> asyncio.Task[Answer]:
    return asyncio.create_task(client.post(chat(content), **headers))


def waiting(client: Client) -> int:
    return client.gateway.router.upstreams[0].slots.waiting


def limited(url: str, name: str = "", most: int = 2) -> UpstreamSettings:
    return UpstreamSettings(url=url, name=name, max_requests=1, max_waiting=most)


async def test_further_requests_wait_and_then_are_refused(stage: Stage) -> None:
    """One is under way, two wait in order, and the fourth gets 429 with Retry-After at once."""
    mock = await stage.mock()
    client = await stage.gateway(limited(mock.url))
    mock.hold.clear()
    asking = []
    for number in range(3):
        asking.append(ask(client, f"{number}"))
        await until(lambda: len(mock.received) + waiting(client) == len(asking))
    refused = await client.post(chat("3"))
    assert (refused.status, refused.error["type"], refused.error["code"]) == (429, "rate_limit_error", "upstream_busy")
    assert int(refused.headers["Retry-After"]) >= 1
    assert len(mock.received) == 1
    mock.hold.set()

    assert [(await task).text for task in asking] == ["0", "1", "2"]
    assert [received.fields["messages"][0]["content"] for received in mock.received] == ["0", "1", "2"]
    upstream = client.gateway.router.upstreams[0]
    assert (upstream.slots.taken, upstream.slots.waiting, upstream.in_flight) == (0, 0, 0)


async def test_a_request_that_may_wait_lets_others_pass(stage: Stage) -> None:
    """A request with `x-keepgate-priority: batch` is sent after others that came later."""
    mock = await stage.mock()
    client = await stage.gateway(limited(mock.url))
    mock.hold.clear()
    asking = [ask(client, "first")]
    await mock.wait_for(1)
    asking.append(ask(client, "batch", x_keepgate_priority="batch"))
    await until(lambda: waiting(client) == 1)
    asking.append(ask(client, "urgent"))
    await until(lambda: waiting(client) == 2)
    mock.hold.set()
    await asyncio.gather(*asking)
    assert [received.fields["messages"][0]["content"] for received in mock.received] == ["first", "urgent", "batch"]


async def test_an_upstream_with_room_is_asked_instead(stage: Stage) -> None:
    """Nothing waits while another upstream has a slot, whatever the strategy; when all queues are full there is 429."""
    mocks = [await stage.mock() for _ in range(2)]
    servers = [limited(mock.url, f"up-{number}", most=0) for number, mock in enumerate(mocks)]
    client = await stage.gateway(*servers, routing=first("up-0"))
    await client.gateway.router.refresh()
    for mock in mocks:
        mock.hold.clear()
    asking = []
    for number in range(2):
        asking.append(ask(client, f"{number}"))
        await until(lambda: sum(len(mock.received) for mock in mocks) == len(asking))
    assert [len(mock.received) for mock in mocks] == [1, 1]
    refused = await client.post(chat("2"))
    assert (refused.status, refused.error["code"]) == (429, "upstream_busy")
    for mock in mocks:
        mock.hold.set()
    assert [(await task).status for task in asking] == [200, 200]


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind(stage: Stage) -> None:
    """Its request is never sent, and the slot goes to the next one."""
    mock = await stage.mock()
    client = await stage.gateway(limited(mock.url))
    mock.hold.clear()
    under_way = ask(client, "first")
    await mock.wait_for(1)
    leaving, last = ask(client, "leaving"), ask(client, "last")
    await until(lambda: waiting(client) == 2)
    leaving.cancel()
    await until(lambda: waiting(client) == 1)
    mock.hold.set()

    assert [(await task).text for task in (under_way, last)] == ["first", "last"]
    assert len(mock.received) == 2
    await client.until("flights", 0)


async def test_a_stream_has_its_slot_until_it_ends(stage: Stage) -> None:
    """Another request waits for the end of a stream, or for its client to leave."""
    mock = await stage.mock(Reply(text="a b c", when="stream"), Reply(text="after"))
    client = await stage.gateway(limited(mock.url))
    mock.hold.clear()
    async with client.stream(chat("stream", stream=True)) as stream:
        await stream.event()
        other = ask(client, "other")
        await until(lambda: waiting(client) == 1)
        assert len(mock.received) == 1
    mock.hold.set()
    assert (await other).text == "after"


async def test_health_checks_do_not_wait(stage: Stage) -> None:
    """An upstream that is full is well."""
    mock = await stage.mock()
    client = await stage.gateway(limited(mock.url))
    mock.hold.clear()
    asking = ask(client, "first")
    await mock.wait_for(1)
    await client.gateway.router.refresh()
    assert client.gateway.router.upstreams[0].state == "up"
    mock.hold.set()
    await asking
