"""Streams of an upstream reach the client event by event, and complete ones are stored."""

import asyncio
import json
import random

import pytest

from tests.gateway.client import chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, EVENT_STREAM, Connection, chunked, json_reply, saying
from tests.gateway.upstreams.upstream_examples import ANSWER, EVENTS


def with_breaks(kind: bytes) -> bytes:
    return b"".join(EVENTS).replace(b"\n", kind)


@pytest.mark.parametrize("line_break", [b"\n", b"\r\n", b"\r"])
async def test_every_form_of_events_is_read_and_relayed(stage: Stage, line_break: bytes) -> None:
    """Every form of events (WHATWG HTML, section 9.2) is relayed unchanged, and stored where its end is known."""
    # After a lone CR the end of the last event is known only from the next bytes.
    said = with_breaks(line_break) + (b": end\r\r: end" if line_break == b"\r" else b"")
    client = await stage.gateway(await stage.raw(saying(EVENT_STREAM + said)))
    computed = await client.post(chat(stream=True))
    plain = await client.post(chat())

    assert computed.body == said
    if line_break != b"\r":
        assert plain.cache == "hit"
        assert plain.text == "Grüße!"


@pytest.mark.parametrize("line_break", [b"\n", b"\r\n"])
async def test_events_may_be_cut_anywhere(stage: Stage, line_break: bytes) -> None:
    """Events cut at any byte give the same answer, which is stored."""
    said = with_breaks(line_break)
    cut = 0

    async def converse(connection: Connection) -> None:
        await connection.send_apart(CHUNKED_EVENT_STREAM, chunked(said[:cut]), chunked(said[cut:]) + chunked(b""))

    client = await stage.gateway(await stage.raw(converse))
    for cut in range(1, len(said)):
        computed = await client.post(chat(f"cut at {cut}", stream=True))
        assert computed.body == said
        plain = await client.post(chat(f"cut at {cut}"))
        assert (plain.cache, plain.text) == ("hit", "Grüße!"), cut


@pytest.mark.parametrize("seed", range(8))
async def test_events_may_be_cut_into_many_pieces(stage: Stage, seed: int) -> None:
    """Events in random pieces, down to single bytes, give the same answer."""
    rng = random.Random(seed)  # noqa: S311  # not a secret
    said = with_breaks(rng.choice([b"\n", b"\r\n"]))
    cuts = sorted(rng.sample(range(1, len(said)), rng.choice([3, 20, len(said) - 1])))
    chunks = [said[a:b] for a, b in zip([0, *cuts], [*cuts, len(said)], strict=True)]
    client = await stage.gateway(await stage.raw(saying(EVENT_STREAM, *chunks)))

    assert (await client.post(chat(stream=True))).body == said
    assert (await client.post(chat())).text == "Grüße!"


async def test_events_arrive_when_they_are_sent(stage: Stage) -> None:
    """Each event reaches the client before the upstream sends the next one."""
    go_on = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM)
        for event in EVENTS:
            await connection.send(event)
            await go_on.wait()
            go_on.clear()

    client = await stage.gateway(await stage.raw(converse))
    async with client.stream(chat(stream=True)) as stream:
        for event in EVENTS:
            assert event.endswith(await stream.event() + b"\n\n")
            go_on.set()
        assert await stream.event() == b""


@pytest.mark.parametrize("tail", [b"", b"data: [DO", b'data: {"choices":[]', b"\n", b": bye"])
async def test_a_stream_that_ends_early_is_passed_on_and_not_kept(stage: Stage, tail: bytes) -> None:
    """A stream without [DONE], or cut within an event, is relayed and not stored."""
    said = b"".join(EVENTS[:-1]) + tail
    raw = await stage.raw(saying(EVENT_STREAM + said))
    client = await stage.gateway(raw)
    answers = [await client.post(chat(stream=True)) for _ in range(2)]

    assert {answer.body for answer in answers} == {said}
    assert len(raw.connections) == 2


@pytest.mark.parametrize("framing", ["chunked", "length"])
async def test_a_stream_that_breaks_off_ends_in_an_error_event(stage: Stage, framing: str) -> None:
    """A stream that breaks off ends in an error in OpenAI's form without [DONE] and is not stored."""
    head = CHUNKED_EVENT_STREAM if framing == "chunked" else EVENT_STREAM[:-2] + b"Content-Length: 9999\r\n\r\n"
    said = EVENTS[0] + EVENTS[4]
    raw = await stage.raw(saying(head + (chunked(said) if framing == "chunked" else said)))
    client = await stage.gateway(raw)
    answers = [await client.post(chat(stream=True)) for _ in range(2)]

    for answer in answers:
        assert answer.body.startswith(said)
        error = json.loads(answer.body.removeprefix(said).removeprefix(b"data: "))["error"]
        assert (error["type"], error["code"]) == ("upstream_error", "upstream_cut")
    assert len(raw.connections) == 2


@pytest.mark.parametrize("ending", ["cut", "silent"])
async def test_a_stream_is_complete_at_done(stage: Stage, ending: str) -> None:
    """An answer is complete and stored at [DONE], even if the connection then breaks or never ends."""
    said = EVENTS[0] + EVENTS[4] + EVENTS[5]

    async def serve(connection: Connection) -> None:
        await connection.send(CHUNKED_EVENT_STREAM + chunked(said))
        if ending == "cut":
            connection.cut()
        else:
            await connection.closed()

    raw = await stage.raw(serve)
    client = await stage.gateway(raw)
    first, second = [await client.post(chat(stream=True)) for _ in range(2)]

    assert first.body == said
    assert (first.cache, second.cache) == ("miss", "hit")


async def test_a_json_answer_to_a_stream_request_is_relayed(stage: Stage) -> None:
    """A JSON answer to a stream request is relayed unchanged, and later hits are streamed."""
    client = await stage.gateway(await stage.raw(saying(json_reply(ANSWER))))
    computed = await client.post(chat(stream=True))
    hit = await client.post(chat(stream=True))

    assert (computed.body, computed.headers["Content-Type"]) == (ANSWER, "application/json")
    assert (hit.cache, hit.text) == ("hit", "ok")
    assert hit.headers["Content-Type"] == "text/event-stream"


async def test_an_unrequested_stream_is_relayed(stage: Stage) -> None:
    """A miss has the shape that the upstream chose."""
    client = await stage.gateway(await stage.raw(saying(EVENT_STREAM + b"".join(EVENTS))))
    computed = await client.post(chat())

    assert computed.body == b"".join(EVENTS)
    assert (await client.post(chat())).text == "Grüße!"
