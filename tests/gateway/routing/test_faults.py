"""The matrix of faults: what one upstream does wrong, with another one that is well or alone, streamed or not."""

import asyncio
import json
import random
import time

import msgspec
import pytest

from gateway.settings.upstreams import HedgeSettings
from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Answer, Client, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, Connection, Conversation, RawUpstream, chunked, json_reply
from tests.gateway.routing import failing_upstreams as faults
from tests.gateway.routing.failing_upstreams import QUICK, first, named
from tests.gateway.upstreams.upstream_examples import ANSWER, nothing_listens
from tests.waiting import until

TIMEOUTS = {"connect": 1.0, "first_byte": 0.6, "idle": 0.6}
LONGEST = 4.0
"""Seconds for an answer, whatever happens; a single wait takes a quarter of a second."""

# What it does, the status where it is alone, and whether a stream has begun before.
FAULTS: dict[str, tuple[Conversation | None, int, bool]] = {
    "refuses": (None, 502, False),
    "resets": (faults.resets, 502, False),
    "hangs": (faults.hangs, 504, False),
    "hangs after its status": (faults.hangs_after_its_status, 504, False),
    "hangs within": (faults.hangs_within, 504, True),
    "cuts before the first event": (faults.cuts_before_the_first_event, 502, False),
    "cuts within": (faults.cuts_within, 502, True),
    "429": (faults.refuses(b"429 Too Many Requests"), 429, False),
    "500": (faults.refuses(b"500 Internal Server Error"), 500, False),
    "503": (faults.refuses(b"503 Service Unavailable"), 503, False),
    "no HTTP": (faults.says(b"\x00\xff\xfe SSH-2.0\r\n\r\n"), 502, False),
    "a web page": (faults.says(faults.WEB_PAGE), 502, False),
    "no JSON": (faults.says(faults.NO_JSON), 502, False),
    "noise": (faults.says(faults.NOISE_AS_EVENTS), 502, False),
    "noise within": (faults.says_noise_within, 502, True),
    "nothing": (faults.says(faults.NOTHING), 502, False),
    "an error with 200": (faults.says_an_error_with_200, 200, False),
}


def is_broken_off(answer: Answer) -> bool:
    """Whether a stream ends in one error event, after the first event of the upstream."""
    *events, last = answer.events
    return answer.status == 200 and len(events) == 1 and "error" in json.loads(last) and b"[DONE]" not in answer.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_another_upstream_answers(stage: Stage, fault: str, stream: bool) -> None:
    """The client gets the whole answer of the other upstream, unless a part of another one has reached it already."""
    conversation, _, begins = FAULTS[fault]
    bad = RawUpstream(conversation or faults.resets)
    well = await stage.mock(Reply(text="right"))
    async with bad.serving():
        servers = named(bad.url, "bad"), named(well.url, "well")
        client = await stage.gateway(*servers, retries=QUICK, timeouts=TIMEOUTS, routing=first("bad"))
        await client.gateway.router.refresh()
        if conversation is not None:
            await _check_answer(client, well, stream, begins=begins)
    if conversation is None:  # it has been there
        await _check_answer(client, well, stream, begins=begins)
    else:
        assert len(bad.connections) == 1


async def _check_answer(client: Client, well: MockUpstream, stream: bool, *, begins: bool) -> None:
    began = time.monotonic()
    answer = await client.post(chat(stream=stream))
    assert time.monotonic() - began < LONGEST

    if begins and stream:
        assert is_broken_off(answer)
        assert not well.received
    else:
        assert (answer.status, answer.text, answer.cache) == (200, "right", "miss")
        assert len(well.received) == 1
        again = await client.post(chat(stream=stream))
        assert (again.text, again.cache) == ("right", "hit")
    await client.until("flights", 0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_an_upstream_that_is_alone(stage: Stage, fault: str, stream: bool) -> None:
    """The client gets one error in time, which is not stored: when the upstream is well again, it answers.

    It is asked again only where it has said that it did not work on the request.
    """
    conversation, status, begins = FAULTS[fault]
    raw = await stage.raw(conversation or faults.resets)
    bad = nothing_listens() if conversation is None else raw.url
    client = await stage.gateway(bad, retries=QUICK, timeouts=TIMEOUTS)
    began = time.monotonic()
    answer = await client.post(chat(stream=stream))
    assert time.monotonic() - began < LONGEST

    if begins and stream:
        assert is_broken_off(answer)
    elif stream and status == 200:
        assert [set(json.loads(event)) for event in answer.events] == [{"error"}]
    else:
        assert (answer.status, set(answer.json)) == (status, {"error"})
    await client.until("flights", 0)
    if conversation is not None:
        assert len(raw.connections) == (3 if status in (429, 503) else 1)
        raw.conversation = faults.is_well
        again = await client.post(chat(stream=stream))
        assert (again.status, again.text, again.cache) == (200, "ok", "miss")


async def test_answers_are_not_mixed_up(stage: Stage) -> None:
    """Under many requests to upstreams that fail at random, each client gets the answer to its own or an error."""
    chance = random.Random(7)  # noqa: S311  # no secret
    conversations = [conversation for conversation, _, _ in FAULTS.values() if conversation is not None]

    async def converse(connection: Connection) -> None:
        if chance.random() < 0.3:
            await chance.choice(conversations)(connection)
            return
        asked = msgspec.json.decode(connection.body)["messages"][0]["content"].encode()
        if faults.is_stream(connection):
            events = [faults.EVENTS[0].replace(b'"ok"', b'"%s"' % asked), *faults.EVENTS[1:], b""]
            await connection.send(CHUNKED_EVENT_STREAM + b"".join(map(chunked, events)))
        else:
            await connection.send(json_reply(ANSWER.replace(b'"ok"', b'"%s"' % asked)))

    raws = [await stage.raw(converse) for _ in range(3)]
    hedging = HedgeSettings(after=0.05, share=0.5)
    client = await stage.gateway(*raws, retries=QUICK, timeouts=TIMEOUTS, hedging=hedging)
    await client.gateway.router.refresh()

    async def ask(number: int) -> bool:
        answer = await client.post(chat(f"number {number}", stream=number % 2 == 0))
        if answer.status != 200 or b'"error"' in answer.body:
            return False
        assert answer.text == f"number {number}"
        again = await client.post(chat(f"number {number}", stream=number % 2 == 1))
        assert (again.text, again.cache) == (f"number {number}", "hit")
        return True

    answered = await asyncio.gather(*(ask(number) for number in range(150)))
    assert sum(answered) > 75
    await client.until("flights", 0)
    upstreams = client.gateway.router.upstreams
    # A health check of an upstream that has come back may be under way.
    await until(lambda: not any(upstream.in_flight or upstream.slots.waiting for upstream in upstreams))
