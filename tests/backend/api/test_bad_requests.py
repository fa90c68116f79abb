"""Every bad request is a 4xx in OpenAI's form that names the field, and the server keeps serving."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from backend.errors import InvalidRequest
from backend.protocol import ChatRequest, decode_request
from tests.backend.conftest import CHAT, COMPLETIONS, EMBEDDINGS, MODEL, Served, StartServer

USER = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER, "max_tokens": 1, **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hi", "max_tokens": 1, **fields}


def schema_request(**fields: Any) -> dict[str, Any]:
    described = {"name": "n", "schema": {"type": "object"}, **fields}
    return chat(response_format={"type": "json_schema", "json_schema": described})


WRONG_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": USER}, "model"),
    (CHAT, {"model": MODEL}, "messages"),
    (CHAT, chat(model=5), "model"),
    (CHAT, chat(messages="Hi"), "messages"),
    (CHAT, chat(messages=[]), "messages"),
    (CHAT, chat(messages=["Hi"]), "messages[0]"),
    (CHAT, chat(messages=[{"content": "Hi"}]), "messages[0].role"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "Hi"}]), "messages[0].role"),
    (CHAT, chat(messages=[{"role": "user"}]), "messages[0].content"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), "messages[0].content"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0].type",
    ),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
    (
        CHAT,
        chat(messages=[*USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}]),
        "messages[1].tool_calls[0].function",
    ),
    (CHAT, chat(temperature="hot"), "temperature"),
    (CHAT, chat(temperature=-0.1), "temperature"),
    (CHAT, chat(temperature=2.1), "temperature"),
    (CHAT, chat(top_p=1.5), "top_p"),
    (CHAT, chat(top_k=-2), "top_k"),
    (CHAT, chat(top_k=1.5), "top_k"),
    (CHAT, chat(min_p=2), "min_p"),
    (CHAT, chat(n=0), "n"),
    (CHAT, chat(n=10**30), "n"),
    (CHAT, chat(n=True), "n"),
    (CHAT, chat(seed=1.5), "seed"),
    (CHAT, chat(seed=2**63), "seed"),
    (CHAT, chat(max_tokens=0), "max_tokens"),
    (CHAT, chat(max_tokens="5"), "max_tokens"),
    (CHAT, chat(max_tokens=None, max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, chat(max_tokens=1, max_completion_tokens=2), "max_tokens"),
    (CHAT, chat(presence_penalty=3), "presence_penalty"),
    (CHAT, chat(frequency_penalty=-3), "frequency_penalty"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"49152": 1}), "logit_bias"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias"),
    (CHAT, chat(logit_bias=[1]), "logit_bias"),
    (CHAT, chat(logprobs=5), "logprobs"),
    (CHAT, chat(top_logprobs=2), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(stop=5), "stop"),
    (CHAT, chat(stop=""), "stop"),
    (CHAT, chat(stop=["a", ""]), "stop"),
    (CHAT, chat(stop=["a"] * 17), "stop"),
    (CHAT, chat(stop="a" * 1001), "stop"),
    (COMPLETIONS, text(stop=["a", "b" * 1001]), "stop"),
    (CHAT, chat(stream="yes"), "stream"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, chat(tools=[5]), "tools[0]"),
    (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}] * 2), "tools[1].function.name"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "strict": 1}}]), "tools[0].function.strict"),
    (
        CHAT,
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]),
        "tools[0].function.parameters.type",
    ),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tool_choice="always"), "tool_choice"),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "g"}}), "tool_choice.function.name"),
    (CHAT, chat(functions=[{"name": "f f"}]), "tools[0].function.name"),
    (CHAT, chat(functions=[{"name": "f"}], function_call={"name": "g"}), "tool_choice.function.name"),
    (CHAT, chat(tools=[{"type": 5}]), "tools[0].type"),
    (CHAT, chat(min_tokens=-1), "min_tokens"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids"),
    (CHAT, chat(prompt_logprobs=21), "prompt_logprobs"),
    (CHAT, chat(chat_template_kwargs=[]), "chat_template_kwargs"),
    (CHAT, chat(response_format={"type": "yaml"}), "response_format.type"),
    (CHAT, chat(response_format={"type": "json_object", "schema": {}}), "response_format.schema"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (CHAT, schema_request(name=None), "response_format.json_schema.name"),
    (CHAT, schema_request(schema=[]), "response_format.json_schema.schema"),
    (CHAT, schema_request(strict="yes"), "response_format.json_schema.strict"),
    (CHAT, schema_request(indent=2), "response_format.json_schema.indent"),
    (CHAT, schema_request(schema={"type": "wizard"}), "response_format.json_schema.schema"),
    (CHAT, schema_request(schema={"$ref": "#/$defs/absent"}), "response_format.json_schema.schema"),
    (CHAT, schema_request(schema={"type": "array", "uniqueItems": True}), "response_format.json_schema.schema"),
    (CHAT, chat(response_format={"type": "json_object"}, ignore_eos=True), "ignore_eos"),
    (CHAT, chat(priority=2**31), "priority"),
    (CHAT, chat(priority="high"), "priority"),
    (CHAT, chat(modalities=["audio"]), "modalities"),
    (CHAT, chat(messages=[{"role": "user", "content": "word " * 3000}]), "messages"),
    (COMPLETIONS, {"model": MODEL}, "prompt"),
    (COMPLETIONS, text(prompt=[]), "prompt"),
    (COMPLETIONS, text(prompt=""), "prompt"),
    (COMPLETIONS, text(prompt=5), "prompt"),
    (COMPLETIONS, text(prompt=[49152]), "prompt"),
    (COMPLETIONS, text(prompt=[-1]), "prompt"),
    (COMPLETIONS, text(prompt=["a", 5]), "prompt[1]"),
    (COMPLETIONS, text(prompt=[[5], []]), "prompt[1]"),
    (COMPLETIONS, text(prompt=[[5], [10**30]]), "prompt[1]"),
    (COMPLETIONS, text(prompt=["a"] * 40), "prompt"),
    (COMPLETIONS, text(prompt=[5] * 2048), "prompt"),
    (COMPLETIONS, text(prompt="word " * 100_000), "prompt"),
    (COMPLETIONS, text(max_tokens=-1), "max_tokens"),
    (COMPLETIONS, text(logprobs=21), "logprobs"),
    (COMPLETIONS, text(logprobs=True), "logprobs"),
    (COMPLETIONS, text(best_of=2), "best_of"),
    (COMPLETIONS, text(suffix="end"), "suffix"),
    (EMBEDDINGS, {"model": MODEL}, "input"),
    (EMBEDDINGS, {"model": MODEL, "input": ""}, "input"),
    (EMBEDDINGS, {"model": MODEL, "input": ["a", ""]}, "input[1]"),
    (EMBEDDINGS, {"model": MODEL, "input": ["a"] * 2049}, "input"),
    (EMBEDDINGS, {"model": MODEL, "input": "a", "dimensions": 8}, "dimensions"),
    (EMBEDDINGS, {"model": MODEL, "input": "a", "encoding_format": "int8"}, "encoding_format"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
    ("/tokenize", {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"model": "gpt-4o", "prompt": "a"}, "model"),
    ("/detokenize", {"tokens": [49152]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
]

BROKEN_BODIES: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("not JSON", b"hello"),
    ("cut short", b'{"model": "x", "messages": [{"role"'),
    ("two values", b"{} {}"),
    ("an array", b"[]"),
    ("a number", b"5"),
    ("null", b"null"),
    ("NaN", json.dumps(chat(temperature=float("nan"))).encode()),
    ("infinity", json.dumps(chat(temperature=float("inf"))).encode()),
    ("a float beyond all floats", json.dumps(chat()).replace('"max_tokens": 1', '"temperature": 1e999').encode()),
    ("thousands of digits", b'{"model": "x", "n": ' + b"9" * 10_000 + b"}"),
    ("invalid UTF-8", b'{"model": "\xff\xfe", "messages": []}'),
    ("invalid UTF-8 in a message", json.dumps(chat()).encode().replace(b"Hi", b"\xc3\x28")),
    ("half a surrogate pair", json.dumps(chat()).encode().replace(b"Hi", b"\\ud83d")),
    ("deep nesting", b'{"model": "x", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("deep nesting of an unknown field", b'{"zz": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"),
]


async def assert_refused(served: Served, path: str, body: bytes, statuses: tuple[int, ...] = (400,)) -> dict[str, Any]:
    async with served.client.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
        content = await response.read()
        assert response.status in statuses, content
        assert response.content_type == "application/json"
    error: dict[str, Any] = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


async def test_every_wrong_field_is_named(server: Served) -> None:
    """A wrong field is a 400 (404 for the model) whose ``param`` is the field's path."""
    for path, body, param in WRONG_FIELDS:
        error = await assert_refused(server, path, json.dumps(body).encode(), (400, 404))
        assert error["param"] == param, (body, error)
        assert param.split("[")[0].split(".")[-1] in error["message"], error
    assert server.state.engine.in_flight == 0


@pytest.mark.parametrize(("name", "body"), BROKEN_BODIES, ids=[name for name, _ in BROKEN_BODIES])
async def test_a_body_that_is_no_request_is_a_400(server: Served, name: str, body: bytes) -> None:
    """A body that is not a JSON object of numbers and texts is a 400, and the server keeps serving."""
    for path in (CHAT, COMPLETIONS):
        await assert_refused(server, path, body)
    assert (await server.post(CHAT, messages=USER, max_tokens=1))["object"] == "chat.completion"


async def test_null_means_absent(server: Served) -> None:
    """A null means that the optional field is absent, even for a field that the server does not know."""
    names = ["n", "stop", "seed", "temperature", "tools", "logit_bias", "logprobs", "stream", "audio", "no_such_field"]
    answer = await server.post(CHAT, messages=USER, max_tokens=1, **dict.fromkeys(names))
    assert len(answer["choices"]) == 1


async def test_fields_that_change_nothing_are_accepted(server: Served) -> None:
    """Fields that clients send by default and that change nothing are accepted and leave the answer as it is."""
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
    }
    plain = await server.post(CHAT, messages=USER, max_tokens=4, temperature=0)
    decorated = await server.post(CHAT, messages=USER, max_tokens=4, temperature=0, **harmless)
    assert decorated["choices"] == plain["choices"]


async def test_errors_say_code_and_type(server: Served) -> None:
    """The errors that clients act upon have OpenAI's types and codes."""
    error = await assert_refused(server, CHAT, json.dumps(chat(model="gpt-4o")).encode(), (404,))
    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
    error = await assert_refused(server, COMPLETIONS, json.dumps(text(prompt=[5] * 3000)).encode())
    assert error["code"] == "context_length_exceeded"


async def test_a_body_over_the_limit_is_a_413(server: Served) -> None:
    """A body over the size limit is a 413 with OpenAI's error form."""
    error = await assert_refused(server, CHAT, b" " * (5 * 2**20), (413,))
    assert error["code"] == "request_too_large"


async def test_paths_and_methods_that_do_not_exist(server: Served) -> None:
    """An unknown path or model is a 404 and a wrong method a 405, in OpenAI's form."""
    async with server.client.get("/v1/nothing") as response:
        assert response.status == 404
        assert "error" in await response.json()
    async with server.client.get(CHAT) as response:
        assert response.status == 405
        assert "error" in await response.json()
    async with server.client.get("/v1/models/gpt-4o") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "model_not_found"


async def test_a_body_that_stalls_is_a_408(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that does not arrive in time is a 408, and no request stays in flight."""
    monkeypatch.setattr("backend.api.http_body.BODY_TIMEOUT_SECONDS", 0.05)
    served = await start_server()
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    status = await reader.readline()
    assert b" 408 " in status
    writer.close()
    assert served.state.engine.in_flight == 0


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            b'{"model":"m","messages":[{"role":"%s"}]}' % (b"x" * 100_000),
            "messages[0].role: expected one of system, developer, user, assistant, tool, function",
        ),
        (b'{"model":"m","messages":[],"top_p":1e999}', "top_p: expected a number of at most 64 bits"),
        (
            b'{"model":"m","stop":"a\xffb","messages":[]}',
            "the body is not valid UTF-8: byte 22 cannot be decoded",
        ),
        (b'{"model":"m","stop":["\\ud83c"]}', "the body is not valid JSON: a string has half of a surrogate pair"),
        (
            b'{"model":"m","temperature":NaN}',
            "the body is not valid JSON: JSON is malformed: invalid character",
        ),
        (b'{"model":"m","stop":["' + b"[" * 100_000, "the body is not valid JSON: Input data was truncated"),
    ],
)
def test_a_refusal_says_in_short_what_would_be_right(body: bytes, sentence: str) -> None:
    """A refusal is shorter than 200 characters and says what would be right, however long the body is."""
    with pytest.raises(InvalidRequest) as refused:
        decode_request(body, ChatRequest, "m")
    assert str(refused.value).startswith(sentence)
    assert len(str(refused.value)) < 200
