"""The Python client `openai` against the engine: schemas from classes, tools, streams and embeddings."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.backend.api.test_tools import ASKING
from tests.backend.api.test_tools import TOOLS as _TOOLS
from tests.backend.chat import tool_templates
from tests.backend.conftest import MODEL, Served, StartServer

TOOLS: Any = _TOOLS  # plain dictionaries, which the library takes and its types do not


class Person(BaseModel):
    age: int
    colour: Literal["red", "green"]


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def test_parse_returns_an_object_of_the_class(server: Served) -> None:
    """`parse` sends a class as a strict schema and returns an object of that class."""
    async with client_of(server) as client:
        answer = await client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Ann is 7 and likes red. Answer as JSON."}],
            response_format=Person,
            temperature=0,
            max_completion_tokens=60,
        )
    person = answer.choices[0].message.parsed
    assert isinstance(person, Person)
    assert person.colour in ("red", "green")


async def test_a_conversation_with_a_tool(start_server: StartServer) -> None:
    """The client gets a tool call, sends the call and its result back, and gets an answer that uses the result."""
    served = await start_server(template=tool_templates.HERMES)
    messages: list[Any] = list(ASKING)
    async with client_of(served) as client:
        first = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_completion_tokens=60
        )
        assert first.choices[0].finish_reason == "tool_calls"
        message = first.choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages += [
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "rainy"},
        ]
        second = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_completion_tokens=20
        )
    assert second.choices[0].message.content
    assert "rain" in second.choices[0].message.content


async def test_the_stream_helper_assembles_tool_calls(start_server: StartServer) -> None:
    """The client's stream helper assembles a tool call from the chunks and accepts their indices, ids and types."""
    served = await start_server(template=tool_templates.LIST)
    messages: list[Any] = list(ASKING)
    names, arguments = [], ""
    async with (
        client_of(served) as client,
        client.chat.completions.stream(
            model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_completion_tokens=60
        ) as stream,
    ):
        async for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                arguments += event.arguments_delta
            if event.type == "tool_calls.function.arguments.done":
                names.append(event.name)
        final = await stream.get_final_completion()
    assert names == ["weather"]
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.arguments == arguments
    assert json.loads(arguments) == {"city": "Paris"}
    assert final.choices[0].finish_reason == "tool_calls"


async def test_embeddings(server: Served) -> None:
    """The client's default base64 embeddings unpack to the numbers that floats give."""
    async with client_of(server) as client:
        packed = await client.embeddings.create(model=MODEL, input=["one", "two"])
        floats = await client.embeddings.create(model=MODEL, input=["one", "two"], encoding_format="float")
    assert [len(entry.embedding) for entry in packed.data] == [576, 576]
    for left, right in zip(packed.data, floats.data, strict=True):
        assert left.embedding == pytest.approx(right.embedding, abs=1e-5)


async def test_a_refusal_names_the_field(server: Served) -> None:
    """The client's BadRequestError has the path of the field."""
    messages: list[Any] = list(ASKING[-1:])
    async with client_of(server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=messages, tools=[*TOOLS, *TOOLS])
    assert caught.value.param == "tools[2].function.name"
