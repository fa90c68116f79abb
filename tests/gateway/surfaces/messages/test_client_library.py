"""Anthropic's own client library reads the answers and streams, and gets the message that they say."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from cache.entries.answer import stream_of
from gateway.errors import GatewayError, UpstreamDisconnected
from gateway.surfaces.messages.surface import MessagesSurface
from gateway.surfaces.surface import ChatRequest

Json = dict[str, Any]

SURFACE = MessagesSurface()
ASK: Json = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Weather?"}]}
ARGUMENTS = {"city": "Rome", "days": [1, 2.5], "note": 'a "quoted" \\ text'}
ANSWER: Json = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "I look it up.",
                "reasoning_content": "They want the weather.",
                "tool_calls": [
                    {
                        "id": f"c{number}",
                        "type": "function",
                        "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
                    }
                    for number in range(2)
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 5,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
}
NATIVE: Json = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude",
    "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {
            "type": "text",
            "text": "So.",
            "citations": [
                {
                    "type": "char_location",
                    "cited_text": "a",
                    "document_index": 0,
                    "document_title": None,
                    "start_char_index": 0,
                    "end_char_index": 1,
                }
            ],
        },
        {"type": "tool_use", "id": "t", "name": "now", "input": {}},
    ],
    "stop_reason": "stop_sequence",
    "stop_sequence": "END",
    "usage": {"input_tokens": 1, "output_tokens": 2, "cache_read_input_tokens": 3, "service_tier": "standard"},
}


@asynccontextmanager
async def server(body: bytes, status: int = 200) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """A client of a server that answers every request with these bytes."""
    kind = "text/event-stream" if body.startswith(b"event:") else "application/json"

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, status=status, content_type=kind)

    app = web.Application()
    app.router.add_post("/v1/messages", answer)
    async with TestServer(app) as running:
        client = anthropic.AsyncAnthropic(base_url=str(running.make_url("/")), api_key="any", max_retries=0)
        async with client:
            yield client


async def final_message(stream: bytes) -> Json:
    async with server(stream) as client, client.messages.stream(**ASK) as running:
        texts = [text async for text in running.text_stream]
        message = await running.get_final_message()
    assert "".join(texts) == "".join(block.text for block in message.content if block.type == "text")
    made: Json = json.loads(message.model_dump_json(exclude_unset=True))
    return made


def as_read(message: Json) -> Json:
    """A message as the library shows it: without the extension, which belongs to a later event than it keeps."""
    return {name: value for name, value in message.items() if name != "chat_completion"}


def without_null(message: Json) -> Json:
    return {name: value for name, value in message.items() if value is not None}


async def test_a_plain_answer() -> None:
    """A stored chat completion is a message for the library."""
    own = SURFACE.own_answer(ANSWER, ChatRequest({}), "public.0123")
    async with server(json.dumps(own).encode()) as client:
        message = await client.messages.create(**ASK)
    assert message.content[2].type == "tool_use"
    assert message.content[2].input == ARGUMENTS
    assert json.loads(message.model_dump_json(exclude_unset=True)) == own


@pytest.mark.parametrize("message", [SURFACE.own_answer(ANSWER, ChatRequest({}), "public.0123"), NATIVE])
async def test_a_replayed_stream(message: Json) -> None:
    """A stored answer that is streamed is the same message, with its tokens and why it stopped."""
    read = await final_message(SURFACE.own_stream(message, ChatRequest({}, stream=True)))
    assert without_null(read) == without_null(as_read(message))


async def test_a_translated_stream() -> None:
    """Chunks of a chat completion that are translated as they arrive are the message of the whole."""
    translator = SURFACE.translator(ChatRequest({}, stream=True), "public.0123")
    frames = stream_of(ANSWER, include_usage=True).split(b"\n\n")[:-2]
    stream = b"".join(translator.add(json.loads(frame.removeprefix(b"data: "))) for frame in frames)
    read = await final_message(stream + translator.finish())
    assert without_null(read) == without_null(as_read(SURFACE.own_answer(ANSWER, ChatRequest({}), "public.0123")))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (GatewayError("Broken."), anthropic.InternalServerError),
        (UpstreamDisconnected("Broken."), anthropic.InternalServerError),
    ],
)
async def test_errors(error: GatewayError, kind: type[anthropic.APIStatusError]) -> None:
    """The library raises the error of a response and of a stream, with its message."""
    async with server(SURFACE.error_body(error), error.status) as client:
        with pytest.raises(kind) as raised:
            await client.messages.create(**ASK)
    assert raised.value.body == {"type": "error", "error": {"type": "api_error", "message": "Broken."}}
    async with server(SURFACE.error_event(error)) as client:
        with pytest.raises(anthropic.APIStatusError, match="Broken"):
            async with client.messages.stream(**ASK) as stream:
                await stream.get_final_message()
