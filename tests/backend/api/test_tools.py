"""Tools over HTTP with the real model, two examples in the conversation, and a template of each format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.backend.api.test_server import events
from tests.backend.chat import tool_templates
from tests.backend.conftest import CHAT, MODEL, Served, StartServer


def function(name: str, argument: str, **more: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {argument: {"$ref": "#/$defs/word"}},
        "required": [argument],
        "additionalProperties": False,
        "$defs": {"word": {"type": "string"}},
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def exchange(city: str, weather: str, call_id: str) -> list[dict[str, Any]]:
    call = {"name": "weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"Weather in {city}?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": call_id, "type": "function", "function": call}]},
        {"role": "tool", "content": weather, "tool_call_id": call_id},
        {"role": "assistant", "content": f"It is {weather}."},
    ]


TOOLS = [function("weather", "city", description="Weather of a city"), function("clock", "zone", strict=True)]
TAUGHT = [*exchange("Rome", "sunny", "c1"), *exchange("Oslo", "cold", "c2")]
ASKING = [*TAUGHT, {"role": "user", "content": "Weather in Paris?"}]
FORMATS = ["HERMES", "LIST", "MISTRAL", "NAMED", "LLAMA3"]


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": ASKING, "tools": TOOLS, "temperature": 0, "max_tokens": 60, **fields}


def assembled(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The messages that a client puts together from a stream's deltas."""
    messages: dict[int, dict[str, Any]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        message = messages.setdefault(choice["index"], {"content": "", "calls": [], "finish": None})
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["finish"] = choice["finish_reason"] or message["finish"]
        for piece in delta.get("tool_calls", []):
            if "id" in piece:
                assert piece["index"] == len(message["calls"])
                message["calls"].append({"name": piece["function"]["name"], "arguments": "", "type": piece["type"]})
            message["calls"][piece["index"]]["arguments"] += piece["function"]["arguments"]
    return messages


@pytest.mark.parametrize("name", FORMATS)
async def test_a_model_calls_a_tool_in_its_own_format(start_server: StartServer, name: str) -> None:
    """In each format the answer and the stream have the same call with JSON arguments and no marker in the content."""
    served = await start_server(template=getattr(tool_templates, name))
    whole = await served.post(CHAT, **body())
    (choice,) = whole["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    *chunks, done = await events(served, CHAT, **body())
    assert done == "[DONE]"
    (message,) = assembled(chunks).values()
    assert message == {
        "content": "",
        "finish": "tool_calls",
        "calls": [{"type": "function", **call["function"]}],
    }


@pytest.mark.parametrize("name", FORMATS)
async def test_tool_choice_is_followed(start_server: StartServer, name: str) -> None:
    """`tool_choice` is followed: a named tool is called, `required` forces a call, and `none` forbids one."""
    served = await start_server(template=getattr(tool_templates, name))
    named = {"type": "function", "function": {"name": "clock"}}
    answer = await served.post(CHAT, **body(tool_choice=named))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"
    assert json.loads(call["function"]["arguments"]).keys() == {"zone"}
    small_talk = [{"role": "user", "content": "Hello!"}]
    fields = {"messages": small_talk, "temperature": 1.0, "seed": 3, "tool_choice": "required", "n": 2}
    drawn = await served.post(CHAT, **body(**fields, parallel_tool_calls=False, max_tokens=60))
    for choice in drawn["choices"]:
        if choice["finish_reason"] == "length":
            continue  # a name of hundreds of letters is a string too
        (call,) = choice["message"]["tool_calls"]
        schema = {"weather": {"city"}, "clock": {"zone"}}
        assert json.loads(call["function"]["arguments"]).keys() == schema[call["function"]["name"]]
    answer = await served.post(CHAT, **body(tool_choice="none"))
    assert "tool_calls" not in answer["choices"][0]["message"]
    content = answer["choices"][0]["message"]["content"]
    assert content
    assert "<tool_call>" not in content
    assert "[TOOL_CALLS]" not in content


async def test_an_answer_without_calls_is_text(start_server: StartServer) -> None:
    """An answer that calls no tool is plain text, whole and streamed alike."""
    served = await start_server(template=tool_templates.HERMES)
    messages = [*TAUGHT, {"role": "user", "content": "Thank you! Now say: It is good."}]
    lines = [message for message in messages if message.get("tool_calls") is None and message["role"] != "tool"]
    answer = await served.post(CHAT, **body(messages=lines))
    choice = answer["choices"][0]
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")
    *chunks, _ = await events(served, CHAT, **body(messages=lines))
    assert assembled(chunks)[0]["content"] == choice["message"]["content"]


async def test_several_answers_with_seeds_and_logprobs(start_server: StartServer) -> None:
    """Each of n answers has its own calls and logprobs, and the stream with the same seed has the same ones."""
    served = await start_server(template=tool_templates.HERMES)
    fields = body(n=3, temperature=0.9, seed=5, logprobs=True, tool_choice="required", parallel_tool_calls=False)
    whole = await served.post(CHAT, **fields)
    *chunks, _ = await events(served, CHAT, **fields)
    messages = assembled(chunks)
    for choice in whole["choices"]:
        calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
        streamed = [{k: v for k, v in call.items() if k != "type"} for call in messages[choice["index"]]["calls"]]
        assert streamed == calls
        assert messages[choice["index"]]["finish"] == choice["finish_reason"]
        entries = choice["logprobs"]["content"]
        text = "".join(entry["token"] for entry in entries)
        assert text.startswith("<tool_call>\n{")
        in_chunks = [
            entry
            for chunk in chunks
            if chunk["choices"][0]["index"] == choice["index"] and chunk["choices"][0]["logprobs"]
            for entry in chunk["choices"][0]["logprobs"]["content"]
        ]
        assert in_chunks == entries


async def test_tools_beside_a_schema(start_server: StartServer) -> None:
    """With tools and a schema an answer is either a call or what the schema allows."""
    served = await start_server(template=tool_templates.HERMES)
    schema: dict[str, Any] = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    called = (await served.post(CHAT, **body(response_format=form)))["choices"][0]
    assert called["finish_reason"] == "tool_calls"
    fields = body(response_format=form, messages=[{"role": "user", "content": "Reply in JSON."}])
    choice = (await served.post(CHAT, **fields))["choices"][0]
    if choice["finish_reason"] != "tool_calls":
        assert json.loads(choice["message"]["content"]).keys() == {"ok"}


async def refusal(served: Served, **fields: Any) -> dict[str, Any]:
    async with served.client.post(CHAT, json={"model": MODEL, **body(**fields)}) as response:
        assert response.status == 400, await response.text()
        error: dict[str, Any] = (await response.json())["error"]
        return error


async def test_wrong_tools_and_calls_are_named(start_server: StartServer) -> None:
    """A strict schema that cannot be followed and a history call without valid JSON are named by their field."""
    served = await start_server(template=tool_templates.HERMES)
    strange = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    strict = {"type": "function", "function": {"name": "f", "parameters": strange, "strict": True}}
    error = await refusal(served, tools=[*TOOLS, strict])
    assert error["param"] == "tools[2].function.parameters"
    assert "uniqueItems" in error["message"]
    loose = {"type": "function", "function": {"name": "f", "parameters": strange}}
    assert (await served.post(CHAT, **body(tools=[*TOOLS, loose])))["choices"][0]["finish_reason"] == "tool_calls"
    history = exchange("Rome", "sunny", "c1")
    history[1]["tool_calls"][0]["function"]["arguments"] = "city=Rome"
    error = await refusal(served, messages=history)
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"
    history[1]["tool_calls"][0]["function"] = {"arguments": "{}"}
    error = await refusal(served, messages=history)
    assert error["param"] == "messages[1].tool_calls[0].function.name"
