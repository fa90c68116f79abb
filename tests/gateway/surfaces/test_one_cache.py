"""A conversation is computed once, in whichever form of API it is asked, and each client gets its own form."""

import asyncio
import contextlib
from typing import Any

import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Client
from tests.gateway.conftest import Stage
from tests.gateway.surfaces.dialects import (
    CALLER_NAMES,
    CALLERS,
    KEY,
    Dialect,
    Question,
    Said,
    completion,
)

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Bern"}'}}
OTHER_CALL = {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": '{"city": "Köln"}'}}
BERN, KÖLN = ("look", '{"city": "Bern"}'), ("look", '{"city": "K\\u00f6ln"}')
LONG = 'Über den Wolken — ☁️ 🌦.\n"Quoted" \\ and <tags>. ' * 200

ANSWERS: dict[str, tuple[dict[str, Any], Said]] = {
    "text": (completion({"content": "Sunny."}), Said("Sunny.")),
    "cached prompt": (completion({"content": "Sunny."}, cached=8), Said("Sunny.", cached=8)),
    "cut off": (completion({"content": "Sun"}, "length"), Said("Sun", stop="length")),
    "long text": (completion({"content": LONG}), Said(LONG)),
    "thoughts": (
        completion({"content": "Sunny.", "reasoning_content": "Let me see."}),
        Said("Sunny.", "Let me see."),
    ),
    "a call": (
        completion({"content": None, "tool_calls": [CALL]}, "tool_calls"),
        Said(calls=(BERN,), stop="tool_calls"),
    ),
    "thoughts, text and calls": (
        completion(
            {"content": "I look.", "reasoning_content": "Where?", "tool_calls": [CALL, OTHER_CALL]}, "tool_calls", 4
        ),
        Said("I look.", "Where?", (BERN, KÖLN), "tool_calls", cached=4),
    ),
}
callers = pytest.mark.parametrize(("dialect", "stream"), CALLERS, ids=CALLER_NAMES)


@callers
@pytest.mark.parametrize(("answer", "said"), ANSWERS.values(), ids=ANSWERS.keys())
async def test_whoever_asks_first_asks_for_all(
    stage: Stage, answer: dict[str, Any], said: Said, dialect: Dialect, stream: bool
) -> None:
    """The client libraries of all forms of API read the same answer, after one call to the upstream."""
    mock = await stage.mock(Reply(body=answer))
    client = await stage.gateway(mock)
    question = Question(tool="look" if said.calls else "")

    first = await dialect.ask(client, question, stream)
    others = [await other.ask(client, question, streams) for other, streams in CALLERS]

    assert first == dialect.can_say(said)
    assert others == [other.can_say(said) for other, _ in CALLERS]
    assert len(mock.received) == 1


@callers
async def test_what_differs_in_any_form_is_asked_again(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Another text, system prompt, limit or tool is another request, in each form of API."""
    mock = await stage.mock(Reply(body=completion({"content": "Sunny."})))
    client = (await stage.gateway(mock)).tenant(KEY)
    questions = [Question(), Question("And now?"), Question(system="Be long."), Question(max_tokens=65)]
    questions += [Question(tool="look"), Question(tool="listen")]
    answers = [await client.post(dialect.body(question, stream), dialect.path) for question in questions]

    assert [answer.cache for answer in answers] == ["miss"] * len(questions)
    assert len({answer.entry for answer in answers}) == len(questions)
    assert len(mock.received) == len(questions)


@callers
async def test_another_tenant_has_an_answer_of_its_own(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """What one tenant has been answered is computed anew for another, whose clients then share it."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    for key in ("one", "other"):
        for other, streams in CALLERS:
            await client.tenant(key).post(other.body(Question(), streams), other.path)
        again = await client.tenant(key).post(dialect.body(Question(), stream), dialect.path)
        assert again.cache == "hit"

    assert len(mock.received) == 2


@callers
async def test_requests_in_flight_share_a_call(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Who comes while an answer is computed, of which some may have been sent, reads all of it in its own form."""
    answer, said = ANSWERS["thoughts, text and calls"]
    mock = await stage.mock(Reply(body=answer))
    mock.hold.clear()
    client = await stage.gateway(mock)
    before = await client.figure("collapsed_requests_total")
    question = Question(tool="look")
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(dialect.ask(client, question, stream))
        await mock.wait_for(1)
        others = [tasks.create_task(other.ask(client, question, streams)) for other, streams in CALLERS]
        await client.until("collapsed_requests_total", before + len(CALLERS))
        mock.hold.set()

    assert first.result() == dialect.can_say(said)
    assert [task.result() for task in others] == [other.can_say(said) for other, _ in CALLERS]
    assert len(mock.received) == 1


@callers
async def test_the_first_may_leave(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """A call goes on for those who joined it when the client that started it disconnects."""
    answer, said = ANSWERS["thoughts, text and calls"]
    mock = await stage.mock(Reply(body=answer))
    mock.hold.clear()
    client = await stage.gateway(mock)
    before = await client.figure("collapsed_requests_total")
    question = Question(tool="look")
    first = asyncio.create_task(dialect.ask(client, question, stream))
    await mock.wait_for(1)
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(other.ask(client, question, streams)) for other, streams in CALLERS]
        await client.until("collapsed_requests_total", before + len(CALLERS))
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        mock.hold.set()

    assert [task.result() for task in others] == [other.can_say(said) for other, _ in CALLERS]
    assert (len(mock.received), mock.cancelled) == (1, 0)


@callers
async def test_a_call_ends_with_its_last_client(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """When all clients have left, in whatever forms, the upstream's call is given up, and nothing is stored."""
    mock = await stage.mock(Reply(text="Sunny."))
    mock.hold.clear()
    client = await stage.gateway(mock)
    before = await client.figure("collapsed_requests_total")
    first = asyncio.create_task(dialect.ask(client, Question(), stream))
    await mock.wait_for(1)
    others = [asyncio.create_task(other.ask(client, Question(), streams)) for other, streams in CALLERS]
    await client.until("collapsed_requests_total", before + len(CALLERS))
    for task in (*others, first):
        task.cancel()
    await asyncio.gather(first, *others, return_exceptions=True)
    await mock.wait_for_cancelled(1)
    mock.hold.set()
    again = await client.tenant(KEY).post(dialect.body(Question(), stream), dialect.path)

    assert again.cache == "miss"
    assert len(mock.received) == 2


async def test_a_stream_is_translated_as_it_arrives(served: tuple[Client, MockUpstream]) -> None:
    """A client of another form reads the first words while the upstream still computes the rest."""
    client, mock = served
    words = [{"content": "Sun"}, {"content": "ny."}]
    chunks = [
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "mock",
            "choices": [{"index": 0, "delta": delta, "finish_reason": None}],
        }
        for delta in words
    ]
    end = {**chunks[0], "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    mock.replies[:] = [Reply(events=[*chunks, end, "[DONE]"])]
    for dialect, streams in CALLERS:
        if streams and dialect.name != "chat":
            mock.hold.clear()
            body = dialect.body(Question(dialect.name), True)
            async with asyncio.timeout(10), client.stream(body, dialect.path) as stream:
                arrived = b""
                while b"Sun" not in arrived:
                    arrived += await stream.response.content.readany()
                assert b"ny." not in arrived
                mock.hold.set()
                rest = await stream.response.content.read()
                assert b"ny." in rest
