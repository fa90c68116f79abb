"""Tools on a model whose chat template has no place for them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.backend.api.test_server import events
from tests.backend.api.test_tools import ASKING, TOOLS, assembled, function
from tests.backend.chat import tool_templates
from tests.backend.conftest import CHAT, Served, StartServer

# As a family of models does it that has no system messages, and insists on alternating roles.
ALTERNATING = """\
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}{{ '<|im_start|>assistant\\n' }}"""


def fields(**more: Any) -> dict[str, Any]:
    return {"messages": ASKING, "tools": TOOLS, "temperature": 0, "max_tokens": 60, **more}


@pytest.mark.parametrize("template", [None, tool_templates.UNKNOWN, ALTERNATING])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_call_is_held_to_its_schema(start_server: StartServer, template: str | None, choice: Any) -> None:
    """With the model's own template, with one of an unknown format, and with one without system messages."""
    served = await start_server() if template is None else await start_server(template=template)
    answer = await served.post(CHAT, **fields(tool_choice=choice, parallel_tool_calls=False))
    (found,) = answer["choices"]
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"city" if call["function"]["name"] == "weather" else "zone"}
    *chunks, _ = await events(served, CHAT, **fields(tool_choice=choice, parallel_tool_calls=False))
    (message,) = assembled(chunks).values()
    assert message["calls"] == [{"type": "function", **call["function"]}]


async def test_a_named_tool_is_called_once(server: Served) -> None:
    """A request that names the tool gets one call of it, also where several calls would be allowed."""
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await server.post(CHAT, **fields(tool_choice=choice, temperature=1.5, seed=5, n=6, max_tokens=200))
    assert [len(found["message"]["tool_calls"]) for found in answer["choices"]] == [1] * 6


async def test_auto_answers_with_text_or_calls(server: Served) -> None:
    """With two calls as examples the model calls; without tools, or with ``none``, it cannot."""
    called = await server.post(CHAT, **fields())
    assert called["choices"][0]["finish_reason"] in ("tool_calls", "stop")
    text = await server.post(CHAT, **fields(tool_choice="none"))
    assert "tool_calls" not in text["choices"][0]["message"]
    assert "<tool_call>" not in text["choices"][0]["message"]["content"]
    assert (await server.post(CHAT, **fields(tools=[])))["choices"][0]["message"]["content"]


async def test_the_prompt_has_tools_calls_and_results(server: Served) -> None:
    """Calls become text of the assistant, results become messages of the user, and nothing is lost."""
    tokens = await server.post("/tokenize", messages=ASKING, tools=TOOLS)
    prompt = (await server.post("/detokenize", tokens=tokens["tokens"]))["prompt"]
    assert '"name": "weather"' in prompt
    assert "Weather of a city" in prompt
    assert '<tool_call>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_call>' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


async def test_tools_that_a_provider_runs_are_left_out(server: Served) -> None:
    """They are named as ignored, and the functions beside them work."""
    body = fields(tools=[{"type": "web_search"}, *TOOLS], tool_choice="required", model="SmolLM2-135M-Instruct")
    async with server.client.post(CHAT, json=body) as response:
        assert response.status == 200
        assert response.headers["x-keepgate-ignored-fields"] == "tools[0]"


def many(count: int, words: int) -> list[dict[str, Any]]:
    tools = [function(f"tool_{n}", "x", description="What it does. " + "word " * words) for n in range(count)]
    for tool in tools:
        tool["function"]["parameters"]["properties"]["y"] = {"type": "string", "description": "word " * words}
    return tools


async def test_many_tools_are_shortened_to_fit(start_server: StartServer) -> None:
    """40 tools of 26 KB on a context of 2048 tokens: the response says that descriptions were left out."""
    served = await start_server()
    tools = many(40, 50)
    assert len(json.dumps(tools)) > 26_000
    body = fields(tools=tools, messages=ASKING[-1:], model="SmolLM2-135M-Instruct", max_tokens=20)
    async with served.client.post(CHAT, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert response.headers["x-keepgate-ignored-fields"] == "tools.description"
    assert answer["usage"]["prompt_tokens"] < 2048


async def test_too_many_tools_are_refused_with_their_size(start_server: StartServer) -> None:
    """The error has how many tokens they take, in full and shortened, and what the context is."""
    served = await start_server()
    body = fields(tools=many(128, 9), messages=ASKING[-1:], model="SmolLM2-135M-Instruct")
    async with served.client.post(CHAT, json=body) as response:
        error = (await response.json())["error"]
    assert (error["param"], error["code"]) == ("tools", "context_length_exceeded")
    assert "the 128 tools take" in error["message"]
    assert "the context of 2048 tokens" in error["message"]
