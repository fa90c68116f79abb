"""How the gateway learns that an upstream is ill, and that it is back."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import pytest

from gateway.settings.upstreams import BreakerSettings, HealthSettings, RoutingSettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, Conversation, json_reply
from tests.gateway.routing.failing_upstreams import (
    QUICK,
    WEB_PAGE,
    cuts_within,
    first,
    is_well,
    named,
    refuses,
    resets,
    says,
)
from tests.gateway.upstreams.upstream_examples import ANSWER, nothing_listens
from tests.waiting import until

DOWN = refuses(b"503 Service Unavailable")
BUSY = refuses(b"429 Too Many Requests")
LISTED = b'{"object":"list","data":[{"id":"mock","object":"model"}]}'


@asynccontextmanager
async def listening(url: str, answer: Callable[[bytes], bytes | Awaitable[bytes]]) -> AsyncIterator[None]:
    """A server at this address; `answer` makes a response of the head of a request."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b"0"
            )
            await reader.readexactly(int(length))
            response = answer(head)
            writer.write(response if isinstance(response, bytes) else await response)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the gateway has left
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", urlsplit(url).port)
    async with server:
        yield


def healthy(head: bytes) -> bytes:
    return json_reply(LISTED if head.startswith(b"GET") else ANSWER)


def state(client: Client, number: int = 0) -> str:
    return client.gateway.router.upstreams[number].state


async def test_an_upstream_that_comes_back_is_used_again(stage: Stage) -> None:
    """It is asked every second while it is down, and a check that goes well ends the time that it is left alone."""
    url = nothing_listens()
    breaker = BreakerSettings(failures=1, open_for=60.0)
    client = await stage.gateway(url, breaker=breaker, health=HealthSettings(interval=0.02))
    assert (await client.post(chat())).status == 502
    answer = await client.post(chat())
    assert (answer.status, answer.error["code"], state(client)) == (503, "no_upstream", "down")
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    async with listening(url, healthy):
        await until(lambda: state(client) == "up")
        assert (await client.post(chat())).text == "ok"


async def test_a_list_of_models_that_comes_late_is_asked_for_again(stage: Stage) -> None:
    """Within seconds, however long the interval: without the list it gets no request that others could get."""
    url, asked, has_ended = nothing_listens(), 0, asyncio.Event()

    async def late(head: bytes) -> bytes:
        nonlocal asked
        if head.startswith(b"GET /v1/models "):
            asked += 1
            if asked == 1:
                await has_ended.wait()
        return healthy(head)

    async with listening(url, late):
        settings = named(url, "late", health_path="/health")
        client = await stage.gateway(settings, health=HealthSettings(interval=60.0, deadline=0.2))
        await until(lambda: client.gateway.router.upstreams[0].models == frozenset({"mock"}))
        assert state(client) == "up"
        has_ended.set()


async def test_an_upstream_whose_models_become_known_takes_over(stage: Stage) -> None:
    """Also what was sent elsewhere before they were known."""
    url, may_list, has_request, may_refuse = nothing_listens(), asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def late(head: bytes) -> bytes:
        if head.startswith(b"GET"):
            await may_list.wait()
        return healthy(head)

    async def refuses_late(connection: Connection) -> None:
        has_request.set()
        await may_refuse.wait()
        await DOWN(connection)

    async with listening(url, late):
        ill = await stage.raw(refuses_late)
        client = await stage.gateway(ill, url, retries=QUICK)
        await until(lambda: client.gateway.router.upstreams[0].models is not None)
        answering = asyncio.create_task(client.post(chat()))
        await has_request.wait()
        may_list.set()
        await until(lambda: client.gateway.router.upstreams[1].models is not None)
        may_refuse.set()
        answer = await answering
    assert (answer.status, answer.text) == (200, "ok")
    assert len(ill.connections) == 1


async def test_an_upstream_that_fails_is_left_alone_for_a_while(stage: Stage) -> None:
    """After failures in a row it gets no request until its time is over; then one request tries it."""
    raw = await stage.raw(DOWN)
    client = await stage.gateway(raw, breaker=BreakerSettings(failures=2, open_for=0.15))
    answers = [await client.post(chat()) for _ in range(4)]
    assert [answer.status for answer in answers] == [503] * 4
    assert len(raw.connections) == 2
    assert "left alone" in answers[3].error["message"]
    assert "Retry-After" in answers[3].headers

    go_on = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await go_on.wait()
        await is_well(connection)

    raw.conversation = converse
    await until(lambda: state(client) == "half-open")
    trial = asyncio.create_task(client.post(chat("trial")))
    await until(lambda: len(raw.connections) == 3)
    assert [(await client.post(chat(f"{number}"))).status for number in range(2)] == [503, 503]
    go_on.set()
    assert (await trial).status == 200
    assert len(raw.connections) == 3
    assert (await client.post(chat("later"))).status == 200
    assert state(client) == "up"


async def test_failures_that_are_not_in_a_row_leave_it_in_use(stage: Stage) -> None:
    """Each answer that has ended well, whole or streamed, starts the count again."""
    for stream in (False, True):
        raw = await stage.raw(DOWN)
        client = await stage.gateway(raw, breaker=BreakerSettings(failures=2, open_for=60.0))
        for number in range(5):
            raw.conversation = DOWN
            assert (await client.post(chat(f"{number}", stream=stream))).status == 503
            raw.conversation = is_well
            assert (await client.post(chat(f"{number}", stream=stream))).status == 200
        assert state(client) == "up"


async def test_streams_that_break_count(stage: Stage) -> None:
    """An upstream that begins to answer and breaks off is left alone as well."""
    raw = await stage.raw(cuts_within)
    client = await stage.gateway(raw, breaker=BreakerSettings(failures=2, open_for=60.0))
    for number in range(2):
        assert (await client.post(chat(f"{number}", stream=True))).status == 200
    assert (await client.post(chat(stream=True))).status == 503
    assert len(raw.connections) == 2


async def test_what_may_be_the_clients_fault_counts_only_if_another_upstream_answers(stage: Stage) -> None:
    """A tenant's bad request that gives 500 everywhere opens no breaker; 429 never does."""
    breaker = BreakerSettings(failures=1, open_for=60.0)
    for status in (b"500 Internal Server Error", b"429 Too Many Requests"):
        raws = [await stage.raw(refuses(status)) for _ in range(2)]
        client = await stage.gateway(*raws, retries=QUICK, breaker=breaker)
        await client.gateway.router.refresh()
        await client.post(chat())
        assert [state(client, number) for number in range(2)] == ["up", "up"]

    for other, expected in ((is_well, "down"), (refuses(b"400 Bad Request"), "up")):
        raws = [await stage.raw(refuses(b"500 Internal Server Error")), await stage.raw(other)]
        servers = named(raws[0].url, "bad"), named(raws[1].url, "other")
        client = await stage.gateway(*servers, retries=QUICK, breaker=breaker, routing=first("bad"))
        await client.gateway.router.refresh()
        await client.post(chat())
        assert state(client) == expected


async def test_requests_go_past_an_upstream_that_is_left_alone(stage: Stage) -> None:
    """It is not even counted as a failure while others are there."""
    bad, well = await stage.raw(DOWN), await stage.mock()
    servers = named(bad.url, "ill"), named(well.url, "well")
    breaker = BreakerSettings(failures=1, open_for=60.0)
    client = await stage.gateway(*servers, retries=QUICK, breaker=breaker, routing=first("ill"))
    await client.gateway.router.refresh()
    for number in range(4):
        assert (await client.post(chat(f"{number}"))).status == 200
    assert len(bad.connections) == 1
    assert await client.figure("upstream_failures_total", upstream="ill", reason="left_alone") == 0


async def test_an_upstream_that_fails_its_health_check_is_asked_last(stage: Stage) -> None:
    """Its own path is asked; when it is healthy again it gets requests again."""
    health = b"503 Service Unavailable"

    async def converse(connection: Connection) -> None:
        if connection.request_line.startswith("GET /health "):
            await connection.send(json_reply(b"{}", status=health))
        else:
            await is_well(connection)

    def asked() -> int:
        return sum(connection.request_line.startswith("POST") for connection in raw.connections)

    raw, well = await stage.raw(converse), await stage.mock()
    servers = named(raw.url, "ill", health_path="/health"), named(well.url, "well")
    client = await stage.gateway(*servers, routing=first("ill"))
    await client.gateway.router.refresh()
    await client.post(chat("1"))
    assert (asked(), state(client)) == (0, "down")
    health = b"200 OK"
    await client.gateway.router.refresh()
    await client.post(chat("2"))
    assert (asked(), state(client)) == (1, "up")


async def test_a_list_of_models_that_fails_is_a_failed_check(stage: Stage) -> None:
    """A server error means that it is ill; that there is no list, or a credential is missing, does not."""
    for status, expected in (
        (b"500 Oh", "down"),
        (b"404 Not Found", "up"),
        (b"401 Unauthorized", "up"),
        (b"200 OK", "up"),
    ):
        url = nothing_listens()
        async with listening(url, lambda head, status=status: json_reply(LISTED, status=status)):  # type: ignore[misc]
            client = await stage.gateway(url)
            await client.gateway.router.refresh()
            assert state(client) == expected


async def test_a_check_has_a_deadline(stage: Stage) -> None:
    """An upstream that accepts connections and says nothing is down soon, and delays no check of others."""
    async with AsyncExitStack() as stack:
        silent = nothing_listens()
        release = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", urlsplit(silent).port)
        await stack.enter_async_context(server)
        client = await stage.gateway(silent, await stage.mock(), health=HealthSettings(deadline=0.1))
        await until(lambda: state(client, 1) == "up")
        assert state(client) == "down"
        assert (await client.post(chat())).status == 200
        release.set()


@pytest.mark.parametrize(
    ("conversation", "seconds"),
    [(DOWN, 0.4), (resets, 0.4), (says(WEB_PAGE), 0.4), (BUSY, 0.0)],
    ids=["503", "resets", "a web page", "429"],
)
async def test_a_trial_that_fails_is_followed_by_another(
    stage: Stage, conversation: Conversation, seconds: float
) -> None:
    """The upstream is left alone for twice the time, unless it is busy only, and then it is tried again."""
    raw = await stage.raw(DOWN)
    client = await stage.gateway(raw, breaker=BreakerSettings(failures=1, open_for=0.2))
    breaker = client.gateway.router.upstreams[0].breaker
    await client.post(chat())
    await until(lambda: state(client) == "half-open")
    raw.conversation = conversation
    assert (await client.post(chat())).status in (429, 502, 503)
    assert seconds / 2 <= breaker.remaining <= seconds
    await until(lambda: state(client) == "half-open")
    raw.conversation = is_well
    assert (await client.post(chat())).status == 200


async def test_a_trial_that_is_cancelled_leaves_room_for_another(stage: Stage) -> None:
    """When the client of the request that tries an upstream leaves, the next request tries it."""
    raw = await stage.raw(DOWN)
    client = await stage.gateway(raw, breaker=BreakerSettings(failures=1, open_for=0.05))
    await client.post(chat())
    await until(lambda: state(client) == "half-open")

    async def hanging(connection: Connection) -> None:
        await connection.closed()

    raw.conversation = hanging
    trial = asyncio.create_task(client.post(chat("trial")))
    await until(lambda: len(raw.connections) == 2)
    assert (await client.post(chat("other"))).status == 503
    trial.cancel()
    await client.until("flights", 0)
    raw.conversation = says(json_reply(ANSWER))
    assert (await client.post(chat("next"))).status == 200


async def test_a_slow_failure_does_not_end_the_trial_of_another(stage: Stage) -> None:
    """A request that was sent before the upstream was left alone tells nothing of it now."""
    go_on = [asyncio.Event() for _ in range(3)]
    conversations = [DOWN, DOWN, is_well]

    async def converse(connection: Connection) -> None:
        number = len(raw.connections) - 1
        await go_on[number].wait()
        await conversations[number](connection)

    raw = await stage.raw(converse)
    client = await stage.gateway(raw, breaker=BreakerSettings(failures=1, open_for=0.05))
    old = asyncio.create_task(client.post(chat("old")))
    await until(lambda: len(raw.connections) == 1)
    go_on[1].set()
    await client.post(chat("opens it"))
    await until(lambda: state(client) == "half-open")
    trial = asyncio.create_task(client.post(chat("trial")))
    await until(lambda: len(raw.connections) == 3)
    go_on[0].set()
    assert (await old).status == 503
    assert state(client) == "half-open"
    go_on[2].set()
    assert (await trial).status == 200
    assert state(client) == "up"


async def test_an_error_says_nothing_of_an_upstreams_speed(stage: Stage) -> None:
    """One that refuses requests at once must not attract them."""
    mock = await stage.mock(Reply(status=404, error={"message": "no"}, delay=0.02))
    client = await stage.gateway(mock)
    await client.post(chat())
    assert client.gateway.router.upstreams[0].latency == 0
    mock.replies[:] = [Reply(delay=0.02)]
    await client.post(chat())
    assert client.gateway.router.upstreams[0].latency > 0


RUNNING = b'{"models":[{"name":"mock:latest","model":"mock:latest"}]}'
STATUSES = b'{"data":[{"id":"mock","status":{"value":"loaded"}},{"id":"other","status":{"value":"unloaded"}}]}'


@pytest.mark.parametrize(("running", "listed"), [(RUNNING, LISTED), (LISTED, STATUSES)], ids=["Ollama", "llama.cpp"])
async def test_who_says_that_it_has_the_model_is_asked(stage: Stage, running: bytes, listed: bytes) -> None:
    """With `model-aware` the upstream that tells what it has in memory gets the first request for it."""
    asked: list[str] = []

    def answering(name: str, running: bytes, listed: bytes) -> Callable[[bytes], bytes]:
        def answer(head: bytes) -> bytes:
            if head.startswith(b"POST /v1/chat"):
                asked.append(name)
                return json_reply(ANSWER)
            return json_reply(running if b" /api/ps" in head else listed)

        return answer

    cold, warm = nothing_listens(), nothing_listens()
    nobody = STATUSES.replace(b'"loaded"', b'"unloaded"') if listed is STATUSES else LISTED
    async with (
        listening(cold, answering("cold", b'{"models":[]}' if running is RUNNING else LISTED, nobody)),
        listening(warm, answering("warm", running, listed)),
    ):
        client = await stage.gateway(cold, warm, routing=RoutingSettings(strategy="model-aware"))
        upstreams = client.gateway.router.upstreams
        await until(lambda: all(upstream.loaded is not None for upstream in upstreams))
        for number in range(4):
            await client.post(chat(f"question {number}"))
    assert asked == ["warm"] * 4
