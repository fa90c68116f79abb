"""The official client of Ollama, against a server that gives what this surface renders."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from ollama import AsyncClient, ResponseError

from cache.entries.answer import stream_of
from gateway.errors import InvalidRequest
from gateway.http.sse import EventSplitter, event_data, event_json
from gateway.surfaces.ollama.chat import OllamaChatSurface
from gateway.surfaces.ollama.embeddings import embed_answer, embed_request
from gateway.surfaces.ollama.endpoint import OllamaSurface
from gateway.surfaces.ollama.generate import OllamaGenerateSurface
from gateway.surfaces.ollama.loading import is_load, load_answer
from gateway.surfaces.ollama.models import ps, show, tags
from gateway.surfaces.surface import Json

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
MODELS: list[Json] = [{"id": "m", "object": "model", "created": 1_700_000_000, "owned_by": "us"}]


def answer_to(fields: Json) -> Json:
    """Repeat the last message, or call the tool; a server of chat completions in short."""
    message: Json = {"role": "assistant", "content": None, "reasoning_content": "Hm"}
    reason = "stop"
    if fields.get("tools"):
        reason = "tool_calls"
        function = {"name": "weather", "arguments": '{"city": "Paris"}'}
        message["tool_calls"] = [{"id": "call_x", "type": "function", "function": function}]
    else:
        message["content"] = f"You said: {fields['messages'][-1]['content']}"
    choice = {"index": 0, "message": message, "finish_reason": reason}
    usage = {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


async def ask(request: web.Request) -> web.StreamResponse:
    surface: OllamaSurface = OllamaChatSurface() if request.path == "/api/chat" else OllamaGenerateSurface()
    fields = msgspec.json.decode(await request.read())
    if is_load(request.path, fields):
        return web.json_response(load_answer(request.path, fields, 1))
    try:
        asked = surface.chat_request(request.path, fields)
    except InvalidRequest as error:
        return web.Response(status=error.status, body=surface.error_body(error))
    answer = answer_to(asked.fields)
    if not asked.stream:
        return web.json_response(surface.own_answer(answer, asked, "public.1"))
    response = web.StreamResponse(headers={"content-type": surface.stream_type})
    await response.prepare(request)
    translator = surface.translator(asked, "public.1")
    for data in map(event_data, EventSplitter().feed(stream_of(answer, include_usage=True))):
        if data != b"[DONE]":
            await response.write(translator.add(event_json(data)))
    await response.write(translator.finish())
    if asked.fields["messages"][-1]["content"] == "fail":
        await response.write(surface.error_event(InvalidRequest("It failed.")))
    return response


async def embed(request: web.Request) -> web.Response:
    asked = embed_request(request.path, msgspec.json.decode(await request.read())).fields
    inputs = asked["input"] if isinstance(asked["input"], list) else [asked["input"]]
    data = [{"index": index, "embedding": [float(len(text))]} for index, text in enumerate(inputs)]
    return web.json_response(embed_answer(request.path, {"model": "m", "data": data}))


async def about(request: web.Request) -> web.Response:
    answers = {"/api/tags": tags(MODELS), "/api/ps": ps(MODELS), "/api/show": show(MODELS[0])}
    return web.json_response(answers[request.path])


@pytest.fixture
async def client() -> AsyncIterator[AsyncClient]:
    app = web.Application()
    app.add_routes(
        [
            web.post("/api/chat", ask),
            web.post("/api/generate", ask),
            web.post("/api/embed", embed),
            web.post("/api/embeddings", embed),
            web.post("/api/show", about),
            web.get("/api/tags", about),
            web.get("/api/ps", about),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with AsyncClient(host=f"http://127.0.0.1:{runner.addresses[0][1]}") as connected:
        yield connected
    await runner.cleanup()


def user(content: str) -> list[Json]:
    return [{"role": "user", "content": content}]


async def test_a_chat(client: AsyncClient) -> None:
    """Text, thinking and counts."""
    answer = await client.chat("m", user("Hello"), options={"temperature": 0}, think=True)
    assert (answer.message.content, answer.message.thinking) == ("You said: Hello", "Hm")
    assert (answer.done_reason, answer.prompt_eval_count, answer.eval_count) == ("stop", 4, 6)


async def test_a_streamed_chat(client: AsyncClient) -> None:
    """Piece by piece."""
    parts = [part async for part in await client.chat("m", user("Hello"), stream=True)]
    assert "".join(part.message.content or "" for part in parts) == "You said: Hello"
    assert "".join(part.message.thinking or "" for part in parts) == "Hm"
    assert [part.done for part in parts] == [False, False, True]
    assert parts[-1].eval_count == 6


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called(client: AsyncClient, stream: bool) -> None:
    """And its result goes back with the name of the tool."""
    messages: list[Any] = user("What is the weather?")
    if stream:
        parts = [part async for part in await client.chat("m", messages, tools=[WEATHER], stream=True)]
        called = next(part.message for part in parts if part.message.tool_calls)
    else:
        called = (await client.chat("m", messages, tools=[WEATHER])).message
    assert called.tool_calls is not None
    assert called.tool_calls[0].function.arguments == {"city": "Paris"}
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    assert (await client.chat("m", [*messages, called, result])).message.content == "You said: sunny"


async def test_a_prompt(client: AsyncClient) -> None:
    """Whole and streamed, and an empty one, which loads the model."""
    answer = await client.generate("m", "Hello", system="Be brief.")
    parts = [part async for part in await client.generate("m", "Hello", stream=True)]
    loaded = await client.generate("m")
    assert answer.response == "".join(part.response or "" for part in parts) == "You said: Hello"
    assert (loaded.response, loaded.done_reason) == ("", "load")


async def test_errors(client: AsyncClient) -> None:
    """One that comes at once, and one within a stream."""
    with pytest.raises(ResponseError, match=r"'images\[0\]' must be"):
        await client.generate("m", "Hello", images=["data:AAAA"])
    with pytest.raises(ResponseError, match=r"It failed\."):
        _ = [part async for part in await client.chat("m", user("fail"), stream=True)]


async def test_embeddings(client: AsyncClient) -> None:
    """Of a text, of several, and in the older form."""
    assert (await client.embed("m", "abc")).embeddings == [[3.0]]
    assert (await client.embed("m", ["a", "ab"])).embeddings == [[1.0], [2.0]]
    assert (await client.embeddings("m", "abc")).embedding == [3.0]


async def test_models(client: AsyncClient) -> None:
    """Those that are listed, those that run, and one in detail."""
    assert [model.model for model in (await client.list()).models] == ["m"]
    assert [model.name for model in (await client.ps()).models] == ["m"]
    assert (await client.show("m")).capabilities == ["completion", "tools"]
