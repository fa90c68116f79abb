"""Identical requests in flight are one upstream call, which none of them owns."""

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from gateway.http.background_tasks import background_tasks
from gateway.proxy.flight import Flight, FlightTable
from gateway.upstreams.mock import Reply
from tests.gateway.client import DEADLINE, Answer, Client, assemble, chat
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, EVENT_STREAM, Connection, chunked, json_reply
from tests.gateway.routing.failing_upstreams import first, named, resets
from tests.gateway.wire import request_bytes, wire
from tests.waiting import until_steady

USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
WORDS = [f"word{number} " for number in range(12)]
CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "mock"}


def word_events(words: list[str]) -> list[Any]:
    """A stream with one event per word."""
    chunks: list[Any] = [
        {**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    ]
    chunks += [{**CHUNK, "choices": [{"index": 0, "delta": {"content": w}, "finish_reason": None}]} for w in words]
    return [*chunks, {**CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, "[DONE]"]


def as_data(event: Any) -> bytes:
    return event.encode() if isinstance(event, str) else msgspec.json.encode(event)


async def together(client: Client, bodies: list[dict[str, Any]]) -> list[asyncio.Task[Answer]]:
    """Requests that are all in flight when this returns, as subscribers of one flight."""
    before = await client.figure("collapsed_requests_total")
    asking = [asyncio.create_task(client.post(bodies[0]))]
    await client.until("flights", 1)
    asking += [asyncio.create_task(client.post(body)) for body in bodies[1:]]
    await client.until("collapsed_requests_total", before + len(bodies) - 1)
    return asking


class Live:
    """An upstream whose stream the test sends event by event, the same to every connection."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.more = asyncio.Condition()
        self.connections = 0
        self.left = 0

    async def converse(self, connection: Connection) -> None:
        self.connections += 1
        await connection.send(CHUNKED_EVENT_STREAM)
        gone = asyncio.create_task(connection.closed(deadline=60))
        gone.add_done_callback(self._note_left)
        sent = 0
        try:
            while True:
                async with self.more:
                    while len(self.events) == sent:
                        await self.more.wait()
                event = self.events[sent]
                sent += 1
                if event is None:
                    connection.cut()
                    return
                await connection.send(chunked(b"data: " + as_data(event) + b"\n\n"))
                if event == "[DONE]":
                    await connection.send(chunked(b""))
                    return
        finally:
            gone.remove_done_callback(self._note_left)
            gone.cancel()

    def _note_left(self, _: object) -> None:
        self.left += 1

    async def say(self, *events: Any) -> None:
        """Send these next; None breaks the connection."""
        async with self.more:
            self.events += events
            self.more.notify_all()


# One call


async def test_priorities_share_answers_but_no_flight(stage: Stage) -> None:
    """A request does not join a flight of another priority, and a stored answer serves all of them."""
    mock = await stage.mock(Reply(text="the one answer"))
    client = await stage.gateway(mock)
    mock.hold.clear()
    patient = await together(client, [chat(priority=9), chat(priority=9)])
    urgent = asyncio.create_task(client.post(chat(priority=-1)))
    await client.until("flights", 2)
    mock.hold.set()
    answers = await asyncio.gather(*patient, urgent)
    assert {answer.text for answer in answers} == {"the one answer"}
    assert [msgspec.json.decode(received.body)["priority"] for received in mock.received] == [9, -1]
    for later in (chat(), chat(priority=0), chat(priority=9), chat(priority=3, stream=True)):
        assert (await client.post(later)).cache == "hit"
    assert len(mock.received) == 2


async def test_a_refused_priority_does_not_affect_other_requests(stage: Stage) -> None:
    """An upstream without priorities answers a concurrent request without one."""
    both_are_here = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await both_are_here.wait()
        if "priority" in msgspec.json.decode(connection.body):
            error = {"message": "none here", "type": "invalid_request_error", "param": "priority", "code": None}
            await connection.send(json_reply(msgspec.json.encode({"error": error}), status=b"400 Bad Request"))
        else:
            choice = {"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}
            await connection.send(json_reply(msgspec.json.encode({"choices": [choice]})))

    client = await stage.gateway(await stage.raw(converse))
    asking = [asyncio.create_task(client.post(chat(priority=5))), asyncio.create_task(client.post(chat()))]
    await client.until("flights", 2)
    both_are_here.set()
    refused, answered = await asyncio.gather(*asking)
    assert (refused.status, refused.error["message"]) == (400, "none here")
    assert (answered.status, answered.text) == (200, "fine")


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize(
    "shapes",
    [[{}], [{"stream": True}], [USAGE], [{}, {"stream": True}], [{}, USAGE, {"stream": True}], [USAGE, {}]],
    ids=["json", "stream", "stream with usage", "json first", "all, json first", "stream first"],
)
async def test_identical_requests_are_one_upstream_call(stage: Stage, shapes: list[dict[str, Any]], count: int) -> None:
    """Identical concurrent requests are one upstream call, and each gets the answer in its own shape."""
    mock = await stage.mock(Reply(text="the one answer"))
    client = await stage.gateway(mock)
    mock.hold.clear()
    bodies = [chat(**shapes[number % len(shapes)]) for number in range(count)]
    asking = await together(client, bodies)
    mock.hold.set()
    answers = await asyncio.gather(*asking)

    assert len(mock.received) == 1
    assert {answer.text for answer in answers} == {"the one answer"}
    assert len({answer.response["id"] for answer in answers}) == 1
    for body, answer in zip(bodies, answers, strict=True):
        streams = answer.headers["Content-Type"].startswith("text/event-stream")
        assert streams == body.get("stream", False)
        wants_usage = not streams or "stream_options" in body
        assert ("usage" in answer.response) == wants_usage
    assert [answer.cache_status.parameters.get("collapsed") for answer in answers] == [None] + [True] * (count - 1)
    assert {answer.cache for answer in answers} == {"miss"}
    await client.until("flights", 0)


async def test_a_stream_with_usage_does_not_follow_one_without(stage: Stage) -> None:
    """A stream that asks for usage does not join a flight that may have none."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock, cache={"ask_usage": False})
    mock.hold.clear()
    plain = asyncio.create_task(client.post(chat(stream=True)))
    await mock.wait_for(1)
    asking = asyncio.create_task(client.post(chat(**USAGE)))
    await mock.wait_for(2)
    mock.hold.set()

    assert (await asking).chunks[-1]["usage"]["total_tokens"] > 0
    assert "usage" not in (await plain).response


async def test_different_requests_are_different_calls(stage: Stage) -> None:
    """Requests with different keys share no flight."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    asking = [asyncio.create_task(client.post(chat(seed=seed))) for seed in range(6)]
    await mock.wait_for(6)
    mock.hold.set()

    assert len({(await answer).json["id"] for answer in asking}) == 6


@pytest.mark.parametrize("directive", ["no-cache", "no-store"])
async def test_a_request_that_refuses_the_cache_shares_no_flight(stage: Stage, directive: str) -> None:
    """A request that refuses the cache neither joins a flight nor has followers."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    first = asyncio.create_task(client.post(chat()))
    await mock.wait_for(1)
    alone = [asyncio.create_task(client.post(chat(), Cache_Control=directive)) for _ in range(2)]
    await mock.wait_for(3)
    follower = asyncio.create_task(client.post(chat()))
    await asyncio.sleep(0)
    mock.hold.set()
    answers = [await first, *[await answer for answer in alone]]

    assert len({answer.json["id"] for answer in answers}) == 3
    assert (await follower).json["id"] not in {answer.json["id"] for answer in answers[1:]} or directive == "no-cache"


async def test_the_answer_of_a_flight_is_stored_once(stage: Stage) -> None:
    """The answer of a flight is a hit for all later requests."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock)
    stored = await client.figure("stored_answers_total")
    mock.hold.clear()
    asking = await together(client, [chat(), chat(stream=True), chat()])
    mock.hold.set()
    await asyncio.gather(*asking)

    assert (await client.post(chat(stream=True))).cache == "hit"
    assert await client.figure("stored_answers_total") - stored == 1


# Streams


async def test_a_late_follower_gets_the_earlier_and_then_the_live_events(stage: Stage) -> None:
    """A late follower gets all earlier events, and then each event as it arrives."""
    live = Live()
    client = await stage.gateway(await stage.raw(live.converse))
    events = word_events(WORDS)
    await live.say(*events[:6])
    async with client.stream(chat(stream=True)) as leader:
        heard = [await leader.event() for _ in range(6)]
        async with client.stream(chat(stream=True)) as follower:
            assert [await follower.event() for _ in range(6)] == heard == [as_data(event) for event in events[:6]]
            for event in events[6:]:
                await live.say(event)
                assert await leader.event() == await follower.event() == as_data(event)
            assert await follower.rest() == await leader.rest() == []
    assert live.connections == 1


async def test_a_plain_follower_of_a_stream_gets_the_whole_answer(stage: Stage) -> None:
    """A follower that wants no stream gets one response object at the end."""
    live = Live()
    client = await stage.gateway(await stage.raw(live.converse))
    await live.say(*word_events(WORDS)[:5])
    async with client.stream(chat(stream=True)) as leader:
        await leader.event()
        before = await client.figure("collapsed_requests_total")
        follower = asyncio.create_task(client.post(chat()))
        await client.until("collapsed_requests_total", before + 1)
        await live.say(*word_events(WORDS)[5:])
        answer = await follower

    assert answer.json["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}
    ]
    assert live.connections == 1


async def test_the_leader_may_leave(stage: Stage) -> None:
    """A flight whose leader leaves serves its followers and is stored."""
    live = Live()
    client = await stage.gateway(await stage.raw(live.converse))
    events = word_events(WORDS)
    await live.say(*events[:4])
    async with client.stream(chat(stream=True)) as leader:
        await leader.event()
        async with client.stream(chat(stream=True)) as follower:
            await follower.event()
            leader.leave()
            await live.say(*events[4:])
            rest = await follower.rest()

    assert rest == [as_data(event) for event in events[1:]]
    assert (await client.post(chat())).cache == "hit"
    assert live.connections == 1


async def test_the_leader_may_leave_before_the_upstream_answers(stage: Stage) -> None:
    """A flight whose leader leaves before the first byte serves its follower."""
    mock = await stage.mock(Reply(text="hello"))
    client = await stage.gateway(mock)
    mock.hold.clear()
    leader, *followers = await together(client, [chat()] * 4)
    leader.cancel()
    await asyncio.wait([leader])
    mock.hold.set()

    assert {(await follower).text for follower in followers} == {"hello"}
    assert (len(mock.received), mock.cancelled) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("subscribers", [1, 3])
async def test_the_upstream_call_ends_with_its_last_subscriber(stage: Stage, subscribers: int, stream: bool) -> None:
    """The upstream call is cancelled with its last subscriber, and the next request is a new call."""
    mock = await stage.mock(Reply(text="one two three four five six seven eight"))
    client = await stage.gateway(mock)
    mock.hold.clear()
    asking = await together(client, [chat(stream=stream)] * subscribers)
    await mock.wait_for(1)
    for task in asking[:-1]:
        task.cancel()
    await asyncio.wait(asking[:-1] or [asyncio.create_task(asyncio.sleep(0))])
    assert mock.cancelled == 0
    asking[-1].cancel()
    await mock.wait_for_cancelled(1)
    await client.until("flights", 0)
    mock.hold.set()

    answer = await client.post(chat(stream=stream))
    assert (answer.status, answer.cache, answer.cache_status.parameters.get("collapsed")) == (200, "miss", None)


async def test_a_flight_goes_on_when_a_follower_leaves(stage: Stage) -> None:
    """A flight goes on for the others when a follower leaves."""
    live = Live()
    client = await stage.gateway(await stage.raw(live.converse))
    events = word_events(WORDS)
    await live.say(*events[:3])
    async with client.stream(chat(stream=True)) as leader:
        await leader.event()
        async with client.stream(chat(stream=True)) as follower:
            await follower.event()
        await live.say(*events[3:])
        rest = await leader.rest()

    assert rest == [as_data(event) for event in events[1:]]
    assert live.left == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_during_the_end_of_a_flight_is_answered(
    stage: Stage, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A request that arrives while the leader disconnects is answered."""
    mock = await stage.mock(Reply(text="a good answer"))
    client = await stage.gateway(mock)
    for number in range(60):
        body = chat(f"question {number}", stream=stream)
        mock.hold.clear()
        leader = asyncio.create_task(client.post(body))
        await mock.wait_for(len(mock.received) + 1)
        newcomers: list[asyncio.Task[Answer]] = []
        leader.cancel()
        for _ in range(number % 12):
            await asyncio.sleep(0)
        newcomers += [asyncio.create_task(client.post(body)) for _ in range(2)]
        mock.hold.set()
        answers = await asyncio.gather(*newcomers)

        assert {(answer.status, answer.text) for answer in answers} == {(200, "a good answer")}
    await client.until("flights", 0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_flight_that_its_last_subscriber_left_takes_no_other() -> None:
    """A flight without subscribers takes no new one, even before its task is cancelled."""

    async def never() -> None:
        await asyncio.Event().wait()

    async with background_tasks() as tasks:
        table = FlightTable(tasks)
        flight = Flight(keep_bytes=1000, choices=1)
        table.start(flight, never(), "name")
        await asyncio.sleep(0)
        with flight.subscribe():
            assert table.find(("name",)) is flight
        assert table.find(("name",)) is None


# Failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 429, 500, 503])
async def test_followers_get_the_error_that_the_leader_gets(stage: Stage, status: int, stream: bool) -> None:
    """Followers get the leader's error with its status, body and Retry-After, and nothing is stored."""
    mock = await stage.mock(Reply(status=status, error={"message": "no"}, headers={"Retry-After": "3"}, delay=0.2))
    client = await stage.gateway(mock)
    answers = await asyncio.gather(*await together(client, [chat(stream=stream)] * 5))

    assert {(a.status, a.body, a.headers["Retry-After"]) for a in answers} == {
        (status, b'{"error":{"message":"no"}}', "3")
    }
    assert len(mock.received) == 1
    mock.replies[:] = [Reply(text="ok")]
    assert (await client.post(chat(stream=stream))).text == "ok"


async def test_followers_of_either_shape_get_the_error(stage: Stage) -> None:
    """Followers of another shape than the leader get the upstream's error unchanged."""
    mock = await stage.mock(Reply(status=429, error={"message": "slow down"}, delay=0.2))
    client = await stage.gateway(mock)
    answers = await asyncio.gather(*await together(client, [chat(), chat(stream=True), chat()]))

    assert {(a.status, a.body) for a in answers} == {(429, b'{"error":{"message":"slow down"}}')}


@pytest.mark.parametrize("stream", [False, True])
async def test_followers_of_a_call_that_breaks_before_its_answer_get_502(stage: Stage, stream: bool) -> None:
    """An upstream that closes without an answer gives 502 to all subscribers."""
    waiting = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await waiting.wait()
        connection.cut()

    client = await stage.gateway(await stage.raw(converse))
    asking = await together(client, [chat(stream=stream)] * 4)
    waiting.set()
    answers = await asyncio.gather(*asking)

    assert {(a.status, a.error["type"]) for a in answers} == {(502, "upstream_error")}


async def test_a_stream_that_breaks_off_ends_in_an_error_event(stage: Stage) -> None:
    """All subscribers of a stream that breaks off get its events, an error in OpenAI's form, and no [DONE]."""
    live = Live()
    client = await stage.gateway(await stage.raw(live.converse))
    events = word_events(WORDS)[:5]
    await live.say(*events[:3])
    async with client.stream(chat(stream=True)) as leader:
        await leader.event()
        async with client.stream(chat(stream=True)) as follower:
            await live.say(*events[3:])
            before = [await leader.event() for _ in events[1:]]
            await live.say(None)
            heard = [await follower.rest(), [as_data(events[0]), *before, *await leader.rest()]]

    for said in heard:
        assert said[:-1] == [as_data(event) for event in events]
        error = msgspec.json.decode(said[-1])["error"]
        assert (error["type"], error["code"]) == ("upstream_error", "upstream_cut")
    again = asyncio.create_task(client.post(chat(stream=True)))
    await again
    assert again.result().cache == "miss"
    assert live.connections == 2


async def test_a_plain_follower_of_a_stream_that_breaks_off_gets_502(stage: Stage) -> None:
    """A plain follower of a stream that breaks off gets 502 and no cut answer if the next call breaks too."""
    live = Live()
    raw = await stage.raw(live.converse)
    client = await stage.gateway(raw)
    await live.say(*word_events(WORDS)[:5])
    async with client.stream(chat(stream=True)) as leader:
        await leader.event()
        before = await client.figure("collapsed_requests_total")
        follower = asyncio.create_task(client.post(chat()))
        await client.until("collapsed_requests_total", before + 1)
        raw.conversation = resets
        await live.say(None)
        answer = await follower

    assert (answer.status, answer.error["code"], len(raw.connections)) == (502, "upstream_cut", 2)


async def test_a_plain_follower_of_a_stream_that_breaks_off_is_answered_by_another_call(stage: Stage) -> None:
    """Nothing of the stream has been sent to it, so another upstream can answer."""
    live, well = Live(), await stage.mock(Reply(text="whole"))
    raw = await stage.raw(live.converse)
    client = await stage.gateway(named(raw.url, "bad"), named(well.url, "well"), routing=first("bad"))
    await client.gateway.router.refresh()
    await live.say(*word_events(WORDS)[:5])
    async with client.stream(chat(stream=True)) as leader:
        await leader.event()
        before = await client.figure("collapsed_requests_total")
        follower = asyncio.create_task(client.post(chat()))
        await client.until("collapsed_requests_total", before + 1)
        client.gateway.router.upstreams[0].is_healthy = False
        await live.say(None)
        answer = await follower

    assert (answer.status, answer.text) == (200, "whole")


async def test_a_stream_of_an_incomplete_plain_answer_gets_an_error(stage: Stage) -> None:
    """A stream that follows a plain call with an incomplete answer gets an error."""
    waiting = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await waiting.wait()
        await connection.send(
            json_reply(b'{"choices":[{"index":0,"message":{"content":"half"},"finish_reason":null}]}')
        )

    client = await stage.gateway(await stage.raw(converse))
    asking = await together(client, [chat(), chat(stream=True)])
    waiting.set()
    plain, stream = await asyncio.gather(*asking)

    assert plain.status == 200
    assert (stream.status, stream.error["type"]) == (502, "upstream_error")


# Slow readers and bounds


def flood(megabytes: int) -> tuple[list[bytes], bytes]:
    """A stream of about this many MB in pieces of 64 KiB, and its last events."""
    word = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n' % (b"x" * 65_000)
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    return [word] * (megabytes * 16), end


class Flood:
    """An upstream that streams megabytes and counts how many of them were taken."""

    def __init__(self, megabytes: int) -> None:
        self.chunks, self.end = flood(megabytes)
        self.taken = 0
        self.go = asyncio.Event()
        self.go.set()
        self.done = asyncio.Event()

    async def converse(self, connection: Connection) -> None:
        await connection.send(EVENT_STREAM + self.chunks[0])
        await self.go.wait()
        for chunk in self.chunks[1:]:
            await connection.send(chunk)
            self.taken += len(chunk)
        await connection.send(self.end)
        self.done.set()


async def test_a_slow_reader_does_not_hold_up_others(stage: Stage) -> None:
    """A slow reader within the buffer's limit does not delay the other subscribers."""
    upstream = Flood(megabytes=6)
    client = await stage.gateway(await stage.raw(upstream.converse), cache={"max_answer": 64 * 2**20})
    async with client.stream(chat(stream=True)) as slow:
        await slow.event()
        async with client.stream(chat(stream=True)) as quick:
            async with asyncio.timeout(DEADLINE):
                heard = await quick.rest()
        assert heard[-1] == b"[DONE]"
        late = await slow.rest()
    assert late == heard[1:]


async def test_a_flight_beyond_its_limit_waits_for_its_slowest_reader(stage: Stage) -> None:
    """A flight beyond its buffer's limit slows the upstream down and loses nothing."""
    upstream = Flood(megabytes=48)
    upstream.go.clear()
    client = await stage.gateway(await stage.raw(upstream.converse), cache={"max_answer": 2**20})
    body = msgspec.json.encode(chat(stream=True))
    async with wire(client, receive_buffer=2**16) as slow:
        await slow.send(request_bytes(body))
        assert await slow.line() == b"HTTP/1.1 200 OK"
        async with client.stream(chat(stream=True)) as quick:
            reading = asyncio.create_task(quick.rest())
            upstream.go.set()
            # As much was read as fits into the flight and the kernel's buffers, and then no more.
            await until_steady(lambda: upstream.taken)
            assert not upstream.done.is_set()
            assert not reading.done()
            whole = asyncio.create_task(slow.reader.read())
            async with asyncio.timeout(DEADLINE):
                assert len(await reading) == len(upstream.chunks) + 2
            slow.writer.write_eof()
            whole.cancel()


async def test_a_reader_that_stopped_is_disconnected(stage: Stage) -> None:
    """A reader that stopped is disconnected after timeouts.client, and the others read to the end."""
    upstream = Flood(megabytes=40)
    upstream.go.clear()
    raw = await stage.raw(upstream.converse)
    client = await stage.gateway(raw, cache={"max_answer": 2**20}, timeouts={"client": 0.5})
    async with wire(client, receive_buffer=2**16) as stuck:
        await stuck.send(request_bytes(msgspec.json.encode(chat(stream=True))))
        assert await stuck.line() == b"HTTP/1.1 200 OK"
        async with client.stream(chat(stream=True)) as quick, asyncio.timeout(DEADLINE):
            upstream.go.set()
            heard = await quick.rest()

    assert heard[-1] == b"[DONE]"
    assert len(heard) == len(upstream.chunks) + 2
    assert len(raw.connections) == 1


async def test_a_flight_without_its_first_events_takes_no_follower(stage: Stage) -> None:
    """A request for an answer beyond the buffer's limit makes a call of its own."""
    upstream = Flood(megabytes=4)
    raw = await stage.raw(upstream.converse)
    client = await stage.gateway(raw, cache={"max_answer": 2**20})
    async with client.stream(chat(stream=True)) as first:
        for _ in range(40):
            await first.event()
        whole = await client.post(chat(stream=True))
        rest = await first.rest()

    assert len(raw.connections) == 2
    assert len(whole.events) == len(upstream.chunks) + 2
    assert len(rest) == len(upstream.chunks) + 2 - 40


async def test_a_plain_follower_of_an_answer_beyond_the_limit_gets_an_error(stage: Stage) -> None:
    """A plain follower of an answer beyond the limit gets an error at once, and the stream goes on."""
    upstream = Flood(megabytes=8)
    gate = asyncio.Event()

    async def converse(connection: Connection) -> None:
        await connection.send(EVENT_STREAM + upstream.chunks[0])
        await gate.wait()
        for chunk in upstream.chunks[1:]:
            await connection.send(chunk)
        await connection.send(upstream.end)

    client = await stage.gateway(await stage.raw(converse), cache={"max_answer": 2**20})
    async with client.stream(chat(stream=True)) as leader:
        await leader.event()
        before = await client.figure("collapsed_requests_total")
        follower = asyncio.create_task(client.post(chat()))
        await client.until("collapsed_requests_total", before + 1)
        gate.set()
        async with asyncio.timeout(DEADLINE):
            rest = await leader.rest()
        answer = await follower

    assert len(rest) == len(upstream.chunks) + 1
    assert answer.status == 502


async def test_the_memory_for_an_endless_event_is_bounded(stage: Stage) -> None:
    """An endless event beyond the limit makes the gateway hold or cut the upstream."""
    taken = 0

    async def converse(connection: Connection) -> None:
        nonlocal taken
        await connection.send(EVENT_STREAM + b"data: ")
        for _ in range(64 * 16):
            await connection.send(b"x" * 2**16)
            taken += 2**16

    client = await stage.gateway(await stage.raw(converse), cache={"max_answer": 2**20})
    async with client.stream(chat(stream=True)) as stream:
        async with asyncio.timeout(DEADLINE):
            first = await stream.response.content.readany()
        assert first
        assert taken < 40 * 2**20


async def test_joined_events_make_the_same_answer_for_all(stage: Stage) -> None:
    """Every subscriber of a stream, early or late, builds the same response."""
    mock = await stage.mock(Reply(events=word_events(WORDS), pause=0.01))
    client = await stage.gateway(mock)
    asking: list[asyncio.Task[Answer]] = []
    for number in range(12):
        asking.append(asyncio.create_task(client.post(chat(stream=True))))
        if number == 0:
            await mock.wait_for(1)
        await asyncio.sleep(0.005)
    answers = await asyncio.gather(*asking)

    assert len(mock.received) == 1
    assert {assemble(a.chunks)["choices"][0]["message"]["content"] for a in answers} == {"".join(WORDS)}


async def test_a_client_that_leaves_at_done_has_read_a_whole_answer(stage: Stage) -> None:
    """A client that closes at [DONE] does not stop the answer from being stored."""
    may_end = asyncio.Event()
    events = b"".join(b"data: " + as_data(event) + b"\n\n" for event in word_events(WORDS))

    async def converse(connection: Connection) -> None:
        await connection.send(CHUNKED_EVENT_STREAM + chunked(events))
        await may_end.wait()
        await connection.send(chunked(b""))

    raw = await stage.raw(converse)
    client = await stage.gateway(raw)
    async with client.stream(chat(stream=True)) as stream:
        while await stream.event() != b"[DONE]":
            pass
        stream.leave()
    may_end.set()
    await client.until("flights", 0)

    assert (await client.post(chat(stream=True))).cache == "hit"
    assert len(raw.connections) == 1


async def test_a_request_that_may_wait_has_a_low_priority(stage: Stage) -> None:
    """`x-keepgate-priority: batch` becomes the upstream's field; an upstream that refuses it is asked without, and
    remembered.
    """
    able, unable = await stage.mock(), await stage.mock(Reply(refuses=("priority",)))
    for mock, priorities in ((able, [100, 100]), (unable, [100, None, None])):
        client = await stage.gateway(mock)
        for question in ("a", "b"):
            answer = await client.post(chat(question), x_keepgate_priority="batch")
            assert (answer.status, answer.text) == (200, question)
        assert [received.fields.get("priority") for received in mock.received] == priorities
        assert "x-keepgate-priority" not in {name.lower() for name in mock.received[0].headers}


async def test_a_request_does_not_wait_for_a_batch(stage: Stage) -> None:
    """A flight of low priority is not joined by the same request without one, whose entry is the same."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    mock.hold.clear()
    batch = asyncio.create_task(client.post(chat(), x_keepgate_priority="batch"))
    await mock.wait_for(1)
    direct = asyncio.create_task(client.post(chat()))
    await mock.wait_for(2)
    mock.hold.set()

    assert {answer.entry for answer in await asyncio.gather(batch, direct)} == {(await client.post(chat())).entry}


async def test_a_form_has_no_priority(stage: Stage) -> None:
    """The body of a form stays byte for byte, also where the request may wait."""
    mock = await stage.mock(Reply(body={"text": "hello"}))
    client = await stage.gateway(mock)
    body = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nmock\r\n--b--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b", "x-keepgate-priority": "batch"}
    assert (await client.send("POST", "/v1/audio/transcriptions", body, headers)).cache == "miss"
    assert [received.body for received in mock.received] == [body]
