"""OpenAI's own client reads what the surface writes: answers, streams, errors and stored responses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from pydantic import BaseModel

from cache.entries.answer import stream_of
from cache.stores.conversations import Record
from gateway.errors import InternalError
from gateway.http.sse import EventSplitter, event_data, event_json
from gateway.surfaces.responses.input_items import input_list
from gateway.surfaces.responses.requests import previous_response_not_found
from gateway.surfaces.responses.stored_responses import deleted, input_items, response_not_found
from tests.gateway.surfaces.responses.examples import PATH, SURFACE

Json = dict[str, Any]

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bern"}'}}
MESSAGE = {"role": "assistant", "content": '{"name": "Bern"}', "reasoning_content": "Let me think about it."}
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_700_000_000,
    "model": "m",
    "choices": [{"index": 0, "message": {**MESSAGE, "tool_calls": [CALL]}, "finish_reason": "tool_calls"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}
TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


class City(BaseModel):
    name: str


class Server:
    """Answers every request with ANSWER, from chunks or replayed; and keeps responses as a gateway does."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.replays = False
        self.breaks = False

    async def create(self, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        asked = SURFACE.chat_request(PATH, fields)
        own = SURFACE.own_answer(ANSWER, asked, "entry")
        self.records[own["id"]] = Record(input_list(fields["input"]), own)
        if fields.get("previous_response_id"):
            error = previous_response_not_found(fields["previous_response_id"])
            return web.Response(status=error.status, body=SURFACE.error_body(error), content_type="application/json")
        if not asked.stream:
            return web.json_response(own)
        response = web.StreamResponse(headers={"Content-Type": SURFACE.stream_type})
        await response.prepare(request)
        if self.replays:
            await response.write(SURFACE.own_stream(own, asked))
            return response
        translator = SURFACE.translator(asked, "entry")
        for event in EventSplitter().feed(stream_of(ANSWER, True))[:-1]:
            await response.write(translator.add(event_json(event_data(event))))
        if self.breaks:
            await response.write(SURFACE.error_event(InternalError("The upstream broke.")))
        else:
            await response.write(translator.finish())
        return response

    def _record(self, request: web.Request) -> Record:
        response_id = request.match_info["id"]
        if response_id not in self.records:
            error = response_not_found(response_id)
            raise web.HTTPNotFound(text=SURFACE.error_body(error).decode(), content_type="application/json")
        return self.records[response_id]

    async def retrieve(self, request: web.Request) -> web.Response:
        return web.json_response(self._record(request).response)

    async def input_items(self, request: web.Request) -> web.Response:
        return web.json_response(input_items(self._record(request), request.query))

    async def delete(self, request: web.Request) -> web.Response:
        del self.records[self._record(request).response["id"]]
        return web.json_response(deleted(request.match_info["id"]))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncOpenAI]:
        application = web.Application()
        application.router.add_post(PATH, self.create)
        application.router.add_get(PATH + "/{id}", self.retrieve)
        application.router.add_get(PATH + "/{id}/input_items", self.input_items)
        application.router.add_delete(PATH + "/{id}", self.delete)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            async with (
                asyncio.timeout(30),
                AsyncOpenAI(base_url=f"{site.name}/v1", api_key="k", max_retries=0) as client,
            ):
                yield client
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("replays", [False, True])
async def test_a_stream_gives_the_final_response(replays: bool) -> None:
    """`responses.stream` gives text, arguments and the final response, parsed, of a computed and of a stored answer."""
    server = Server()
    server.replays = replays
    async with server.client() as client:
        plain = await client.responses.create(model="m", input="hi", tools=[TOOL])
        text, arguments, kinds = "", "", []
        async with client.responses.stream(model="m", input="hi", tools=[TOOL], text_format=City) as stream:
            async for event in stream:
                kinds.append(event.type)
                if event.type == "response.output_text.delta":
                    text += event.delta
                    assert event.snapshot == text
                elif event.type == "response.function_call_arguments.delta":
                    arguments += event.delta
                    assert event.snapshot == arguments
            final = await stream.get_final_response()
    assert text == MESSAGE["content"] == final.output_text
    assert arguments == '{"city": "Bern"}'
    assert final.output_parsed == City(name="Bern")
    call = final.output[-1]
    assert call.type == "function_call"
    assert call.parsed_arguments == {"city": "Bern"}
    assert [item.to_dict() for item in plain.output] == [without_parsed(item.to_dict()) for item in final.output]
    assert final.usage is not None
    assert final.usage.total_tokens == 7
    assert kinds[0] == "response.created"
    assert "response.reasoning_text.delta" in kinds


def without_parsed(value: Any) -> Any:
    """An item without what the client adds to it."""
    if isinstance(value, dict):
        return {name: without_parsed(item) for name, item in value.items() if not name.startswith("parsed")}
    return [without_parsed(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("replays", [False, True])
async def test_events_are_read_one_by_one(replays: bool) -> None:
    """`responses.create(stream=True)` gives every event, and the last has the whole response."""
    server = Server()
    server.replays = replays
    async with server.client() as client:
        events = [event async for event in await client.responses.create(model="m", input="hi", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == MESSAGE["content"]
    assert last.response.id == next(iter(server.records))


async def test_an_error_within_a_stream_is_raised() -> None:
    """A client that reads a stream raises APIError with the message and the code of an error in it."""
    server = Server()
    server.breaks = True
    async with server.client() as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="The upstream broke") as raised:
            [event async for event in stream]
    assert raised.value.code == "internal_error"
    assert raised.value.type == "server_error"


async def test_an_unknown_previous_response_is_an_error_of_the_request() -> None:
    """A client that continues what nobody knows gets OpenAI's error."""
    async with Server().client() as client:
        with pytest.raises(openai.NotFoundError, match="'resp_1' not found") as raised:
            await client.responses.create(model="m", input="hi", previous_response_id="resp_1")
    assert raised.value.code == "previous_response_not_found"
    assert raised.value.param == "previous_response_id"


async def test_a_stored_response_is_retrieved_listed_and_deleted() -> None:
    """A client retrieves a response and its input, and deletes it; then it is not found."""
    async with Server().client() as client:
        made = await client.responses.create(model="m", input="hi")
        assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
        (item,) = [item async for item in client.responses.input_items.list(made.id)]
        assert item.type == "message"
        assert item.to_dict()["content"] == [{"type": "input_text", "text": "hi"}]
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError, match="not found"):
            await client.responses.retrieve(made.id)
