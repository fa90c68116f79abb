"""Which requests are sent again, where, and how often."""

import asyncio
import email.utils
import time

import pytest

from gateway.settings.upstreams import BreakerSettings, RetrySettings
from gateway.upstreams.mock import Reply
from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, Conversation
from tests.gateway.routing.failing_upstreams import QUICK, first, is_well, named, refuses, resets
from tests.gateway.upstreams.upstream_examples import nothing_listens
from tests.waiting import until

PATIENT = BreakerSettings(failures=1000)
"""No upstream is left alone."""
BUSY = b"429 Too Many Requests"
DOWN = b"503 Service Unavailable"


def after(*conversations: Conversation) -> Conversation:
    """Each connection has the next of these conversations; all others are well."""
    rest = list(conversations)

    async def converse(connection: Connection) -> None:
        await (rest.pop(0) if rest else is_well)(connection)

    return converse


@pytest.mark.parametrize("status", [BUSY, b"502 Bad Gateway", DOWN, b"529 Overloaded"])
async def test_an_upstream_that_is_alone_is_asked_again_after_a_pause(stage: Stage, status: bytes) -> None:
    """What was not worked on is sent to the same upstream again."""
    raw = await stage.raw(after(refuses(status), refuses(status)))
    client = await stage.gateway(raw, retries=QUICK)
    retries = await client.figure("upstream_retries_total")
    answer = await client.post(chat())

    assert (answer.status, answer.text, len(raw.connections)) == (200, "ok", 3)
    assert await client.figure("upstream_retries_total") == retries + 2


async def test_a_request_is_sent_again_so_often_at_most(stage: Stage) -> None:
    """With `attempts` 2 an upstream that stays busy is asked three times, and its last error is relayed."""
    raw = await stage.raw(refuses(DOWN, b"x-number: 7"))
    client = await stage.gateway(raw, retries=QUICK, breaker=PATIENT)
    answer = await client.post(chat())

    assert (answer.status, answer.headers["x-number"], answer.error["message"]) == (503, "7", "no")
    assert len(raw.connections) == 3


async def test_what_may_be_the_fault_of_the_request_reaches_two_upstreams(stage: Stage) -> None:
    """A request that makes upstreams fail is sent to one other one, and not to all, and never to the same."""
    for conversation in (refuses(b"500 Internal Server Error"), resets):
        raws = [await stage.raw(conversation) for _ in range(4)]
        client = await stage.gateway(*raws, retries=RetrySettings(attempts=9))
        await client.gateway.router.refresh()
        answer = await client.post(chat())

        assert answer.status in (500, 502)
        assert sorted(len(raw.connections) for raw in raws) == [0, 0, 1, 1]


async def test_a_busy_upstream_is_asked_again_after_one_that_failed(stage: Stage) -> None:
    """The one other upstream may be the one that was busy before."""
    busy, failing = await stage.raw(after(refuses(BUSY))), await stage.raw(resets)
    servers = named(busy.url, "busy"), named(failing.url, "failing")
    client = await stage.gateway(*servers, retries=QUICK, routing=first("busy"))
    await client.gateway.router.refresh()
    answer = await client.post(chat())

    assert (answer.status, answer.text) == (200, "ok")
    assert (len(busy.connections), len(failing.connections)) == (2, 1)


async def test_all_requests_together_have_a_budget(stage: Stage) -> None:
    """Forty requests to an upstream that is down are sent again ten times in all."""
    raw = await stage.raw(refuses(DOWN))
    client = await stage.gateway(raw, retries=QUICK, breaker=PATIENT)
    answers = await asyncio.gather(*(client.post(chat(f"{number}")) for number in range(40)))

    assert {answer.status for answer in answers} == {503}
    assert len(raw.connections) == 50


@pytest.mark.parametrize("status", [BUSY, DOWN, b"500 Internal Server Error"])
async def test_what_another_upstream_answers_takes_nothing_of_the_budget(stage: Stage, status: bytes) -> None:
    """No request meets an upstream that always refuses, though four times as many are sent again as the budget has."""
    raw, well = await stage.raw(refuses(status)), await stage.mock()
    servers = named(raw.url, "bad"), named(well.url, "well")
    client = await stage.gateway(*servers, retries=QUICK, breaker=PATIENT, routing=first("bad"))
    await client.gateway.router.refresh()
    answers = [await client.post(chat(f"{number}")) for number in range(40)]

    assert {answer.status for answer in answers} == {200}
    assert len(raw.connections) == 40


async def test_a_fallback_gives_no_retry_back(stage: Stage) -> None:
    """Retries that an upstream has refused are of no use, though the fallback of the model answers."""
    raw, well = await stage.raw(refuses(DOWN)), await stage.mock(models=("other",))
    servers = named(raw.url, "bad"), named(well.url, "well")
    routing = first("bad", fallbacks=("other",))
    client = await stage.gateway(*servers, retries=QUICK, breaker=PATIENT, routing=routing)
    await client.gateway.router.refresh()
    answers = [await client.post(chat(f"{number}")) for number in range(20)]

    assert {answer.status for answer in answers} == {200}
    assert len(raw.connections) == 30


async def test_a_retry_waits_as_long_as_the_upstream_says(stage: Stage) -> None:
    """Retry-After counts from the answer."""
    times: list[float] = []

    async def converse(connection: Connection) -> None:
        times.append(time.monotonic())
        await (is_well if len(times) > 1 else refuses(BUSY, b"Retry-After: 0.15"))(connection)

    client = await stage.gateway(await stage.raw(converse), retries=QUICK)
    assert (await client.post(chat())).status == 200
    assert times[1] - times[0] >= 0.15


@pytest.mark.parametrize(
    ("value", "connections"),
    [
        ("3600", 1),
        (email.utils.formatdate(time.time() + 3600, usegmt=True), 1),
        (email.utils.formatdate(time.time() - 3600, usegmt=True), 2),
        ("0", 2),
        ("soon", 2),
        ("-5", 2),
        ("1e999", 2),
    ],
    ids=["an hour", "a date in an hour", "a date an hour ago", "0", "a word", "less than 0", "no number"],
)
async def test_a_long_wait_is_left_to_the_client(stage: Stage, value: str, connections: int) -> None:
    """A Retry-After, in seconds or as a date, over `longest_pause` is relayed at once; what cannot be read is none."""
    raw = await stage.raw(after(refuses(BUSY, b"Retry-After: " + value.encode())))
    client = await stage.gateway(raw, retries=QUICK)
    answer = await client.post(chat())

    assert len(raw.connections) == connections
    if connections == 1:
        assert (answer.status, answer.headers["Retry-After"]) == (429, value)
    else:
        assert answer.text == "ok"


@pytest.mark.parametrize(
    ("status", "own_key", "is_passed"), [(BUSY, True, True), (BUSY, False, False), (DOWN, False, True)]
)
async def test_an_upstream_that_asks_to_be_left_alone_is(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, status: bytes, own_key: bool, is_passed: bool
) -> None:
    """Others are asked first until its Retry-After is over; a 429 to a client's own credential concerns that client."""
    monkeypatch.setenv("BUSY_KEY", "sk-operator")
    busy, well = await stage.raw(refuses(status, b"Retry-After: 30")), await stage.mock()
    server = named(busy.url, "busy", api_key="env:BUSY_KEY") if own_key else named(busy.url, "busy")
    client = await stage.gateway(server, named(well.url, "well"), retries=QUICK, routing=first("busy"))
    await client.gateway.router.refresh()
    answers = [await client.post(chat(f"{number}")) for number in range(3)]

    assert [answer.status for answer in answers] == [200] * 3
    assert len(busy.connections) == (1 if is_passed else 3)


async def test_a_refused_credential_of_the_operator_is_not_the_clients_fault(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another upstream answers; with none, the client hears that the gateway's own credential was refused."""
    monkeypatch.setenv("OWN_KEY", "sk-operator")
    raw, well = await stage.raw(refuses(b"401 Unauthorized")), await stage.mock(Reply(text="right"))
    server = named(raw.url, "own", api_key="env:OWN_KEY")
    client = await stage.gateway(server, named(well.url, "well"), retries=QUICK, routing=first("own"))
    await client.gateway.router.refresh()
    assert (await client.post(chat(), Authorization="Bearer sk-client")).text == "right"
    assert b"authorization: bearer sk-operator" in raw.connections[0].head.lower()
    assert b"sk-client" not in raw.connections[0].head

    alone = await stage.gateway(server, retries=QUICK)
    answer = await alone.post(chat(), Authorization="Bearer sk-client")
    assert (answer.status, answer.error["code"]) == (502, "upstream_credential")

    relaying = await stage.gateway(raw.url, retries=QUICK)
    assert (await relaying.post(chat(), Authorization="Bearer sk-client")).status == 401


async def test_what_changes_a_state_is_sent_once(stage: Stage) -> None:
    """A request of another endpoint goes elsewhere if there is no connection, and never after it has been sent."""
    raws = [await stage.raw(resets) for _ in range(2)]
    client = await stage.gateway(nothing_listens(), *raws, retries=QUICK)
    answer = await client.post({"name": "x"}, "/v1/assistants")

    assert (answer.status, answer.error["code"]) == (502, "upstream_cut")
    assert sum(len(raw.connections) for raw in raws) == 1


async def test_a_client_that_leaves_in_a_pause_leaves_nothing_behind(stage: Stage) -> None:
    """Nothing is sent again for a client that has gone."""
    raw = await stage.raw(refuses(BUSY, b"Retry-After: 0.2"))
    client = await stage.gateway(raw, retries=RetrySettings(attempts=5, first_pause=0.1))
    asking = asyncio.create_task(client.post(chat()))
    await until(lambda: len(raw.connections) == 1)
    await client.until("flights", 1)
    asking.cancel()
    await client.until("flights", 0)
    await asyncio.sleep(0.3)  # longer than the pause that is over

    assert len(raw.connections) == 1
    assert [upstream.in_flight for upstream in client.gateway.router.upstreams] == [0]
