"""Responses that are continued, read and deleted by their ids, with a Redis and without, through OpenAI's library."""

import asyncio
from typing import Any

import openai
import pytest

from gateway.upstreams.mock import Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, Client
from tests.gateway.conftest import HASTY, Stage
from tests.gateway.surfaces.dialects import (
    CALLER_NAMES,
    CALLERS,
    DIALECTS,
    KEY,
    TRANSLATED,
    Dialect,
    Question,
    names,
    openai_client,
)
from tests.gateway.surfaces.native_answers import PLAIN, STREAMS
from tests.gateway.surfaces.native_upstream import RESPONSES, NativeUpstream

Json = dict[str, Any]

TURNS = [f"Question {number}" for number in range(10)]
streamed = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


async def ask(library: openai.AsyncOpenAI, given: Any, stream: bool = False, **fields: Any) -> Any:
    """The Response to an input, read whole or from a stream."""
    if not stream:
        return await library.responses.create(model="mock", input=given, **fields)
    first = last = None
    async for event in await library.responses.create(model="mock", input=given, stream=True, **fields):
        first, last = first or event, event
    assert first is not None
    assert last is not None
    assert first.type == "response.created"
    assert last.type == "response.completed"
    assert first.response.id == last.response.id
    return last.response


def sent_back(response: Any) -> list[Json]:
    """The output of a Response as a client puts it into its next input."""
    return [item.model_dump(exclude_none=True) for item in response.output]


@streamed
async def test_a_conversation_of_many_turns(stage: Stage, stream: bool) -> None:
    """A chain of responses is the conversation that a client would send whole, in every form of API."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with openai_client(client) as library:
        previous: Any = openai.omit
        responses = []
        for turn in TURNS:
            response = await ask(library, turn, stream, previous_response_id=previous, instructions="Be short.")
            assert response.output_text == turn
            previous = response.id
            responses.append(response)
        whole: list[Any] = []
        for turn, response in zip(TURNS, responses, strict=True):
            whole.append({"role": "user", "content": turn})
            again = await ask(library, whole, not stream, instructions="Be short.")
            assert again.output_text == turn
            whole += sent_back(response)
    messages: list[Json] = [{"role": "system", "content": "Be short."}]
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answer = await client.tenant(KEY).post({"model": "mock", "messages": messages})
        assert answer.cache == "hit"
        messages.append({"role": "assistant", "content": turn})

    assert len({response.id for response in responses}) == len(TURNS)
    assert [len(request.fields["messages"]) for request in mock.received] == list(range(2, 22, 2))


@streamed
async def test_tools_in_a_chain(stage: Stage, stream: bool) -> None:
    """A call's result continues the response with the call, and the upstream sees both."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city":"Bern"}'}}
    message = {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}
    mock = await stage.mock(Reply(message=message, finish_reason="tool_calls"))
    client = await stage.gateway(mock)
    async with openai_client(client) as library:
        asked = await ask(library, "Weather?", stream)
        mock.replies[:] = [Reply(text="Sunny.")]
        result = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
        answered = await ask(library, [result], stream, previous_response_id=asked.id)

    assert answered.output_text == "Sunny."
    assert answered.previous_response_id == asked.id
    assert mock.received[1].fields["messages"] == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


@streamed
async def test_an_equal_request_has_the_same_id(stage: Stage, stream: bool) -> None:
    """A hit, streamed or not, first or later, has the id of the first answer; another request has another."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with openai_client(client) as library:
        first = await ask(library, "hello", stream)
        again = [await ask(library, "hello", streams) for streams in (stream, not stream) * 3]
        others = [
            await ask(library, "hello", stream, **fields)
            for fields in ({"metadata": {"a": "b"}}, {"instructions": "Be short."}, {"store": True, "user": "u"})
        ]
        item = await ask(library, [{"role": "user", "content": "hello"}], stream)

    assert {response.id for response in again} == {first.id}
    assert {tuple(item.id for item in response.output) for response in again} == {tuple(i.id for i in first.output)}
    assert len({first.id, *(response.id for response in others)}) == 4
    assert item.id == first.id


@pytest.mark.parametrize("sampled", ["variants", "bypass"])
@streamed
async def test_each_answer_has_its_own_id(stage: Stage, stream: bool, sampled: str) -> None:
    """Where a request has several answers, each has its own id, which its hits have too, and is continued by it."""
    mock = await stage.mock()
    client = await stage.gateway(mock, cache={"sampled": sampled, "variants": 3})
    ids: dict[str, set[str]] = {}
    async with openai_client(client) as library:
        for number in range(20):
            raw = await client.tenant(KEY).post(
                {"model": "mock", "input": "hello", "stream": stream != (number % 2 > 0)}, RESPONSES
            )
            body = raw.body
            response_id = body[body.index(b'"resp_') + 1 :].partition(b'"')[0].decode()
            ids.setdefault(raw.headers.get("x-keepgate-entry", f"none {number}"), set()).add(response_id)
        known = [(await library.responses.retrieve(one)).id for of_entry in ids.values() for one in of_entry]

    assert {len(of_entry) for of_entry in ids.values()} == {1}
    assert len(set(known)) == len(ids) == (3 if sampled == "variants" else 20)


@streamed
async def test_what_is_read_of_a_response(stage: Stage, stream: bool) -> None:
    """A response and the items that it answered are read by its id, page by page, until it is deleted."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with openai_client(client) as library:
        first = await ask(library, "one", stream)
        second = await ask(library, "two", stream, previous_response_id=first.id, metadata={"a": "b"})
        read = await library.responses.retrieve(second.id)
        listed: list[Any] = [i async for i in library.responses.input_items.list(second.id, order="asc", limit=1)]
        await library.responses.delete(second.id)
        for request in (
            lambda: library.responses.retrieve(second.id),
            lambda: library.responses.delete(second.id),
            lambda: ask(library, "three", stream, previous_response_id=second.id),
        ):
            with pytest.raises(openai.NotFoundError) as raised:
                await request()
            assert second.id in raised.value.message
        still = await library.responses.retrieve(first.id)

    assert read.to_dict() == second.to_dict()
    assert [(item.type, item.role, item.content[0].text) for item in listed] == [
        ("message", "user", "one"),
        ("message", "assistant", "one"),
        ("message", "user", "two"),
    ]
    assert still.to_dict() == first.to_dict()
    assert len(mock.received) == 2


@streamed
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_what_was_deleted_is_asked_again(stage: Stage, stream: bool, times: int) -> None:
    """After its deletion, however often it had been served, a response is computed again and can be continued."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with openai_client(client) as library:
        first, *_ = [await ask(library, "hello", stream) for _ in range(times)]
        await library.responses.delete(first.id)
        again = await ask(library, "hello", stream)
        read = await library.responses.retrieve(again.id)
        continued = await ask(library, "more", stream, previous_response_id=again.id)

    assert read.id == again.id
    assert continued.output_text == "more"
    assert len(mock.received) == 3


@streamed
async def test_a_response_that_is_not_stored(stage: Stage, stream: bool) -> None:
    """With `store: false` the answer is served, from the cache too, and its id is unknown."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with openai_client(client) as library:
        responses = [await ask(library, "hello", stream, store=False) for _ in range(3)]
        for response in responses:
            assert response.store is False
            with pytest.raises(openai.NotFoundError):
                await library.responses.retrieve(response.id)
            with pytest.raises(openai.NotFoundError) as raised:
                await ask(library, "more", stream, previous_response_id=response.id)
            assert raised.value.code == "previous_response_not_found"

    assert len(mock.received) == 1


@streamed
async def test_another_tenant(stage: Stage, stream: bool) -> None:
    """Another tenant's id is unknown, and the tenant's own equal request gets its own answer and id."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    async with openai_client(client, "sk-one") as one, openai_client(client, "sk-two") as two:
        first = await ask(one, "hello", stream)
        for request in (
            lambda: two.responses.retrieve(first.id),
            lambda: two.responses.input_items.list(first.id),
            lambda: two.responses.delete(first.id),
            lambda: ask(two, "more", stream, previous_response_id=first.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await request()
        other = await ask(two, "hello", stream)
        still = await one.responses.retrieve(first.id)
        theirs = await two.responses.retrieve(other.id)

    assert other.id != first.id
    assert (still.id, theirs.id) == (first.id, other.id)
    assert len(mock.received) == 2


@pytest.mark.parametrize(("dialect", "stream"), CALLERS, ids=CALLER_NAMES)
async def test_an_answer_to_another_form_is_continued(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """A hit on what another form of API has asked has an id that is continued too."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    await dialect.ask(client, Question("hello"), stream)
    fields: Json = {"instructions": "Be short.", "max_output_tokens": 64, "temperature": 0}
    async with openai_client(client) as library:
        hit = await ask(library, "hello", stream, **fields)
        await ask(library, "more", stream, previous_response_id=hit.id, **fields)

    assert [len(request.fields["messages"]) for request in mock.received] == [2, 4]


async def test_clients_that_share_a_call_have_ids_of_their_own(stage: Stage) -> None:
    """Requests in flight that share a call and repeat different things are each continued by their own id."""
    mock = await stage.mock()
    mock.hold.clear()
    client = await stage.gateway(mock)
    before = await client.figure("collapsed_requests_total")
    system: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "hello"}]
    async with openai_client(client) as library:
        async with asyncio.TaskGroup() as tasks:
            asked = [
                tasks.create_task(ask(library, given, stream, **fields))
                for given, fields in ((system, {}), ("hello", {"instructions": "Be short."}))
                for stream in (False, True)
            ]
            await mock.wait_for(1)
            await client.until("collapsed_requests_total", before + 3)
            mock.hold.set()
        ids = [task.result().id for task in asked]
        inputs = [[i async for i in library.responses.input_items.list(one)] for one in ids]

    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert [len(items) for items in inputs] == [2, 2, 1, 1]
    assert len(mock.received) == 1


@streamed
async def test_an_upstream_that_keeps_responses(stage: Stage, stream: bool) -> None:
    """An upstream with the Responses API continues its own; what this gateway has translated it continues itself."""
    upstream = NativeUpstream(
        {path: PLAIN[path] for path in (CHAT, RESPONSES)}, {path: STREAMS[path] for path in (CHAT, RESPONSES)}
    )
    async with upstream.serving():
        client = await stage.gateway(upstream.url)
        fields: Json = {"instructions": "Be short.", "max_output_tokens": 64, "temperature": 0}
        async with openai_client(client) as library:
            native = await ask(library, "hello", stream)
            await ask(library, "more", stream, previous_response_id=native.id)
            for _ in range(2):
                with pytest.raises(openai.NotFoundError):
                    await library.responses.retrieve("resp_of_nobody")
            await DIALECTS[0].ask(client, Question("other"), stream)
            hit = await ask(library, "other", stream, **fields)
            await ask(library, "more", stream, previous_response_id=hit.id, **fields)

    paths = [path for path in upstream.paths if "resp_of_nobody" not in path]
    assert native.id == "resp_1"
    assert hit.id.startswith("resp_")
    assert hit.id != native.id
    assert paths == [RESPONSES, RESPONSES, CHAT, CHAT]
    assert b'"previous_response_id":"resp_1"' in upstream.asked[1].body.replace(b" ", b"")
    assert b"previous_response_id" not in upstream.asked[-1].body


@streamed
async def test_gateways_share_conversations(stage: Stage, valkey: Valkey, stream: bool) -> None:
    """With a Redis a response of one gateway is continued, read and deleted at another."""
    mock = await stage.mock()
    one, two = [await stage.gateway(mock, redis=valkey.url) for _ in range(2)]
    async with openai_client(one) as first_library, openai_client(two) as second_library:
        previous: Any = openai.omit
        for number, turn in enumerate(TURNS):
            library = second_library if number % 2 else first_library
            previous = (await ask(library, turn, stream, previous_response_id=previous)).id
        read = [await library.responses.retrieve(previous) for library in (first_library, second_library)]
        await first_library.responses.delete(previous)
        with pytest.raises(openai.NotFoundError):
            await second_library.responses.retrieve(previous)

    assert read[0].to_dict() == read[1].to_dict()
    assert [len(request.fields["messages"]) for request in mock.received] == list(range(1, 21, 2))


async def test_a_hit_at_another_gateway_has_the_same_id(stage: Stage, valkey: Valkey) -> None:
    """Two gateways with one Redis give an answer the same id."""
    mock = await stage.mock()
    one, two = [await stage.gateway(mock, redis=valkey.url) for _ in range(2)]
    async with openai_client(one) as library, openai_client(two) as other:
        ids = [(await ask(library, "hello", stream)).id for stream in (True, False)]
        assert one.gateway.cache.redis is not None
        await one.gateway.cache.redis.flush()
        ids += [(await ask(other, "hello", stream)).id for stream in (False, True)]

    assert len(set(ids)) == 1
    assert len(mock.received) == 1


async def answered(client: Client, dialect: Dialect, stream: bool, text: str) -> int:
    return (await client.tenant(KEY).post(dialect.body(Question(text), stream), dialect.path)).status


async def test_a_frozen_redis(stage: Stage, own_valkey: Valkey) -> None:
    """While Redis is frozen a continuation is 503, for its conversation is not known; nothing else fails."""
    mock = await stage.mock()
    client = await stage.gateway(mock, redis=own_valkey.url, cache=HASTY)
    async with openai_client(client) as library:
        first = await ask(library, "hello")
        own_valkey.freeze()
        try:
            for stream in (False, True):
                for request in (
                    lambda: ask(library, "more", stream, previous_response_id=first.id),  # noqa: B023  # called at once
                    lambda: library.responses.retrieve(first.id),
                    lambda: library.responses.delete(first.id),
                ):
                    with pytest.raises(openai.InternalServerError) as raised:
                        await request()
                    assert (raised.value.status_code, raised.value.code) == (503, "store_unavailable")
            statuses = [await answered(client, *caller, f"{caller}") for caller in CALLERS for _ in range(2)]
            fresh = await ask(library, "fresh")
        finally:
            own_valkey.thaw()
        assert client.gateway.cache.redis is not None
        await client.gateway.cache.redis.breaker.wait_closed()
        continued = await ask(library, "more", previous_response_id=first.id)

    assert statuses == [200] * 2 * len(CALLERS)
    assert fresh.output_text == "fresh"
    assert continued.output_text == "more"


async def test_a_redis_that_is_killed(stage: Stage, own_valkey: Valkey) -> None:
    """A conversation outlives the Redis and the gateway, once Redis is there again."""
    mock = await stage.mock()
    before = await stage.gateway(mock, redis=own_valkey.url)
    async with openai_client(before) as library:
        first = await ask(library, "hello")
        await own_valkey.kill()
        with pytest.raises(openai.InternalServerError):
            await ask(library, "more", previous_response_id=first.id)
        assert (await ask(library, "other")).output_text == "other"
        await own_valkey.start()
    after = await stage.gateway(mock, redis=own_valkey.url)
    async with openai_client(after) as library:
        assert (await ask(library, "more", previous_response_id=first.id)).output_text == "more"


@pytest.mark.parametrize("dialect", TRANSLATED, ids=names(TRANSLATED))
async def test_only_responses_are_kept(stage: Stage, valkey: Valkey, raw: Any, dialect: Dialect) -> None:
    """What other forms of API answer is no conversation that is kept."""
    mock = await stage.mock()
    client = await stage.gateway(mock, redis=valkey.url)
    for stream in (False, True):
        await dialect.ask(client, Question(), stream)
    kept = [key async for key in raw.scan_iter("keepgate:response:*")]

    assert len(kept) == (1 if dialect.name == "responses" else 0)
