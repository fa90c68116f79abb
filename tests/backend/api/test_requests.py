"""Odd tools, schemas, conversations and options get either a right answer or a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.backend.api.test_bad_requests import USER, assert_refused, chat
from tests.backend.chat import tool_templates
from tests.backend.conftest import CHAT, COMPLETIONS, EMBEDDINGS, MODEL, Served, StartServer

ASKED = {"role": "user", "content": "x"}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "c1"}
LOOP = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
HUGE = "9" * 5000
"""A number that Python does not turn into text."""


def called(function: Any = None, **fields: Any) -> dict[str, Any]:
    """An assistant's message with one call."""
    function = {"name": "f", "arguments": "{}"} if function is None else function
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function, **fields}]}


def arguments(text: Any) -> dict[str, Any]:
    return called({"name": "f", "arguments": text})


def talk(*messages: Any, **fields: Any) -> dict[str, Any]:
    return chat(messages=list(messages), **fields)


def tool(parameters: Any, **fields: Any) -> dict[str, Any]:
    function = {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}
    return chat(tools=[function], tool_choice="required")


def schema(value: Any, **fields: Any) -> dict[str, Any]:
    described = {"name": "n", "schema": value, **fields}
    return chat(response_format={"type": "json_schema", "json_schema": described})


def deep(depth: int) -> str:
    """Arguments in arguments."""
    return '{"a":' * depth + "1" + "}" * depth


def filled(body: dict[str, Any], **texts: str) -> bytes:
    """The body as JSON, in which each string of such a name has become the text."""
    written = json.dumps(body)
    for name, text in texts.items():
        written = written.replace(f'"{name}"', text)
    return written.encode()


AT_CALL = "messages[1].tool_calls[0]"
AT_SCHEMA = "response_format.json_schema.schema"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("a call with an id that is no text", talk(ASKED, called(id=5)), f"{AT_CALL}.id"),
    ("a call of another type", talk(ASKED, called(type="custom")), f"{AT_CALL}.type"),
    ("a call without a function", talk(ASKED, called(5)), f"{AT_CALL}.function"),
    ("a call of nothing", talk(ASKED, called({"name": "", "arguments": "{}"})), f"{AT_CALL}.function.name"),
    ("arguments that are a list", talk(ASKED, arguments("[]")), f"{AT_CALL}.function.arguments"),
    ("arguments with NaN", talk(ASKED, arguments('{"a": NaN}')), f"{AT_CALL}.function.arguments"),
    ("arguments with half a pair", talk(ASKED, arguments('{"a": "\\ud800"}')), f"{AT_CALL}.function.arguments"),
    ("arguments with a number too long", talk(ASKED, arguments(f'{{"a": {HUGE}}}')), f"{AT_CALL}.function.arguments"),
    ("arguments nested too deeply", talk(ASKED, arguments(deep(3000))), f"{AT_CALL}.function.arguments"),
    ("a user who calls", talk({**ASKED, "tool_calls": called()["tool_calls"]}), "messages[0].tool_calls"),
    ("a bias for two spellings of one token", chat(logit_bias={"5": 1, "05": 2}), "logit_bias"),
    ("a bias for a number too long", chat(logit_bias={HUGE: 1}), "logit_bias"),
    ("biases for too many tokens", chat(logit_bias={str(token): 1 for token in range(1025)}), "logit_bias"),
    ("a name with a space", schema({"type": "object"}, name="a b"), "response_format.json_schema.name"),
    ("a name too long", schema({"type": "object"}, name="a" * 65), "response_format.json_schema.name"),
    ("a description that is no text", schema({}, description=5), "response_format.json_schema.description"),
    ("a schema that refers to itself", schema({"$ref": "#"}), AT_SCHEMA),
    ("two that refer to each other", schema({"$ref": "#/$defs/a", "$defs": LOOP}), AT_SCHEMA),
    ("a schema that nothing fits", schema({"enum": []}), AT_SCHEMA),
    ("a schema of the network", schema({"$ref": "https://example.org/schema.json"}), AT_SCHEMA),
    ("a schema of the disk", schema({"$ref": "file:///etc/passwd"}), AT_SCHEMA),
    ("a pattern that is none", schema({"type": "string", "pattern": "a" * 500 + "("}), AT_SCHEMA),
    ("a divisor too large to follow", schema({"type": "integer", "multipleOf": 99_999_989}), AT_SCHEMA),
    ("a divisor that is no number", schema({"type": "integer", "multipleOf": True}), AT_SCHEMA),
    ("divisors too large together", schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}), AT_SCHEMA),
    ("too many divisors", schema({"anyOf": [{"multipleOf": 9999}] * 3}), AT_SCHEMA),
    (
        "a strict tool with such a divisor",
        tool({"properties": {"a": {"multipleOf": 0.99999989}}}, strict=True),
        "tools",
    ),
    ("a strict tool that nothing fits", tool({"required": ["a"], "properties": {"a": False}}, strict=True), "tools[0]"),
]
ANSWERED: list[tuple[str, dict[str, Any]]] = [
    ("a history of calls", talk(ASKED, called(), RESULT)),
    ("a call without an id", talk(ASKED, called(id=None))),
    ("arguments that are nothing", talk(ASKED, arguments(""))),
    ("arguments as an object", talk(ASKED, arguments({"a": 1}))),
    ("arguments in depth", talk(ASKED, arguments(deep(100)))),
    ("a result in parts", talk(ASKED, called(), {**RESULT, "content": [{"type": "text", "text": "r"}]})),
    ("no text at all", talk({"role": "user", "content": ""})),
    ("control tokens everywhere", talk(ASKED, called({"name": "<|im_end|>", "arguments": '{"<|im_end|>": 1}'}))),
    ("odd characters", talk({"role": "user", "content": "\0\u202e\U0010ffff\U000f0000<|im_end|>"})),
    ("a tool with a loop", tool({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": LOOP})),
    ("a tool that nothing fits", tool({"required": ["a"], "properties": {"a": False}})),
    ("a tool whose schema is none", tool({"properties": [1]})),
    ("a tool with a divisor too large", tool({"properties": {"a": {"multipleOf": 1e9 + 7}}})),
    ("small divisors", schema({"anyOf": [{"multipleOf": 0.01}, {"multipleOf": 5}, {"multipleOf": 1000}]})),
    ("a schema of a tree", schema({"type": "object", "properties": {"kids": {"items": {"$ref": "#"}}}})),
    ("a schema with many values", schema({"enum": [f"v{number}" for number in range(5000)]})),
    ("what must never be", chat(logit_bias={str(token): -100 for token in range(1024)})),
    ("as many answers as there may be", chat(n=32)),
    ("nothing to stop at", chat(stop=[])),
    ("all that can be stopped at", chat(stop=["é", "\0", "<|im_end|>", *(f"x{number}" for number in range(13))])),
    ("the most and the least log-probabilities", chat(logprobs=True, top_logprobs=20)),
    ("none of them", chat(logprobs=True, top_logprobs=0)),
]


@pytest.fixture
async def server(start_server: StartServer) -> Served:
    """The small model with a place for tools."""
    return await start_server(template=tool_templates.HERMES)


@pytest.mark.parametrize(("name", "body", "param"), REFUSED, ids=[name for name, _, _ in REFUSED])
async def test_invalid_requests_name_the_field(server: Served, name: str, body: dict[str, Any], param: str) -> None:
    """An invalid request is a 400 that names the field and quotes nothing of the grammar, plain and as a stream."""
    for stream in (False, True):
        error = await assert_refused(server, CHAT, json.dumps({**body, "stream": stream}).encode())
        assert str(error["param"]).startswith(param)
        assert error["message"].startswith(error["param"])
        assert len(error["message"]) < 250
        for ours in ("start:", "%json", "x-guidance", "NoExtension", "^"):
            assert ours not in error["message"]


@pytest.mark.parametrize(("name", "body"), ANSWERED, ids=[name for name, _ in ANSWERED])
async def test_odd_but_valid_requests_are_answered(server: Served, name: str, body: dict[str, Any]) -> None:
    """An odd but valid request gets as many answers as it asks for."""
    answer = await server.post(CHAT, **body)
    assert len(answer["choices"]) == body.get("n", 1)


@pytest.mark.parametrize(
    "body",
    [
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"minimum": "HUGE"}}}]),
        schema({"const": "HUGE"}),
        schema({"type": "integer", "maximum": "HUGE"}),
        talk(ASKED, arguments({"a": "HUGE"})),
    ],
    ids=["tool", "const", "maximum", "arguments"],
)
async def test_a_number_of_thousands_of_digits(server: Served, body: dict[str, Any]) -> None:
    """A number of thousands of digits is a 400, wherever it stands."""
    error = await assert_refused(server, CHAT, filled(body, HUGE=HUGE))
    assert error["message"]


@pytest.mark.parametrize("depth", [50, 400, 480, 700, 950, 20_000])
async def test_any_nesting_depth_is_answered_or_refused(server: Served, depth: int) -> None:
    """Tools, arguments and schemas of any nesting depth are answered or refused, and never a server error."""
    parameters = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    control = {"role": "user", "content": "<|im_end|>"}
    bodies = (tool("NESTED"), tool("NESTED", strict=True), schema("NESTED"), talk(control, arguments("NESTED")))
    for body in bodies:
        async with server.client.post(CHAT, data=filled(body, NESTED=parameters)) as response:
            assert response.status in (200, 400), await response.text()
            error = (await response.json()).get("error")
        assert error is None or "%json" not in error["message"]
    async with server.client.post(CHAT, json=talk(ASKED, arguments(deep(depth)))) as response:
        assert response.status in (200, 400), await response.text()


ENDLESS = {"type": "object", "required": ["x"], "properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": LOOP}
OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("body", "param", "named"),
    [
        (schema(ENDLESS), "response_format", "response_format: "),
        (tool(ENDLESS) | schema(ENDLESS) | {"tool_choice": "none"}, "response_format", "response_format: "),
        (tool(ENDLESS), "tools", "tools: "),
        (tool(ENDLESS) | OBJECT, "tools", "tools and response_format: "),
    ],
    ids=["a schema", "a schema and no call", "a tool", "both"],
)
async def test_a_schema_that_cannot_end_is_a_400(server: Served, body: dict[str, Any], param: str, named: str) -> None:
    """A schema whose value could never end is a 400 that names the field it came from."""
    error = await assert_refused(server, CHAT, json.dumps({**body, "max_tokens": 60, "temperature": 0}).encode())
    assert error["param"] == param
    assert error["message"].startswith(named)
    assert "leads back to itself" in error["message"]
    assert (await server.post(CHAT, messages=USER, max_tokens=1))["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("path", "body"),
    [(COMPLETIONS, {"prompt": ["a"] * 40 + [""]}), (EMBEDDINGS, {"input": ["a"] * 2049 + [""]})],
    ids=["completions", "embeddings"],
)
async def test_prompts_are_counted_before_they_are_read(server: Served, path: str, body: dict[str, Any]) -> None:
    """Too many prompts are refused by their number, even if one of them is invalid too."""
    error = await assert_refused(server, path, json.dumps({"model": MODEL, **body}).encode())
    assert error["param"] == next(iter(body))
