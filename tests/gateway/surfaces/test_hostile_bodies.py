"""Bodies that were valid once, altered anywhere: an answer or a clear error, in time, and no fault of the gateway."""

import asyncio
import http.client
import json
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway.conftest import Stage
from tests.gateway.surfaces.dialects import CALLERS, DIALECTS, Dialect, Question
from tests.gateway.surfaces.native_answers import PLAIN, STREAMS
from tests.gateway.surfaces.native_upstream import CHAT, Given, NativeUpstream

Json = dict[str, Any]

EXAMPLES = 100
DEADLINE = 10.0
LIMIT = 2**20
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PARAMETERS: Json = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bern"]}},
    "required": ["city"],
}
FUNCTION: Json = {"name": "look", "description": "Looks.", "parameters": PARAMETERS, "strict": True}
CALL: Json = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Bern"}'}}

CHAT_BODY: Json = {
    "model": "mock",
    "messages": [
        {"role": "system", "content": "Be short."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "low"}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}},
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "seed": 7,
    "n": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1},
    "priority": 3,
    "metadata": {"a": "b"},
}
MESSAGES_BODY: Json = {
    "model": "mock",
    "max_tokens": 64,
    "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "hello", "citations": []},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}, "title": "t"},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "eA=="},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"city": "Bern"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "sunny"}],
                    "is_error": False,
                }
            ],
        },
    ],
    "tools": [{"type": "custom", "name": "look", "description": "Looks.", "input_schema": PARAMETERS}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}, "effort": "low"},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
    "top_k": 5,
    "stream": True,
}
RESPONSES_BODY: Json = {
    "model": "mock",
    "instructions": "Be short.",
    "input": [
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "hello"},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "low"},
                {"type": "input_file", "filename": "x.txt", "file_data": "data:text/plain;base64,eA=="},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "x",
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c",
            "name": "look",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "shell", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "x"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "shell", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
    ],
    "tool_choice": {"type": "function", "name": "look"},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": PARAMETERS}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "metadata": {"a": "b"},
    "max_output_tokens": 64,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": True,
    "stream": True,
    "temperature": 0.5,
    "top_logprobs": 2,
    "truncation": "auto",
}
OPTIONS: Json = {
    "temperature": 0.5,
    "num_predict": 64,
    "num_ctx": 4096,
    "stop": ["x"],
    "seed": 7,
    "repeat_penalty": 1.1,
}
OLLAMA_BODY: Json = {
    "model": "mock",
    "messages": [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "hello", "images": [PNG]},
        {
            "role": "assistant",
            "content": "",
            "thinking": "Hm.",
            "tool_calls": [{"function": {"index": 0, "name": "look", "arguments": {"city": "Bern"}}}],
        },
        {"role": "tool", "tool_name": "look", "content": "sunny"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "format": PARAMETERS,
    "think": True,
    "options": OPTIONS,
    "keep_alive": "5m",
    "stream": True,
    "logprobs": True,
    "top_logprobs": 2,
}
GENERATE_BODY: Json = {
    "model": "mock",
    "prompt": "hello",
    "suffix": "bye",
    "system": "Be short.",
    "template": "{{ .Prompt }}",
    "images": [PNG],
    "context": [1, 2, 3],
    "raw": False,
    "format": "json",
    "think": "low",
    "options": OPTIONS,
    "keep_alive": 0,
    "stream": False,
}
COUNT_BODY = {name: MESSAGES_BODY[name] for name in ("model", "system", "messages", "tools", "tool_choice", "thinking")}
EMBED_BODY: Json = {"model": "mock", "input": ["a", "b"], "truncate": True, "dimensions": 4, "options": {"x": 1}}
SHOW_BODY: Json = {"model": "mock", "name": "mock", "verbose": True, "options": {"a": 1}}

VECTORS = {"object": "list", "data": [{"index": n, "embedding": [0.5]} for n in range(2)], "model": "mock"}
COMPLETION = {
    "id": "c",
    "object": "text_completion",
    "created": 1,
    "model": "mock",
    "choices": [{"index": 0, "text": "bye", "finish_reason": "stop", "logprobs": None}],
}

CHAT_FORM, MESSAGES_FORM, RESPONSES_FORM, OLLAMA_FORM = DIALECTS
ENDPOINTS: dict[str, tuple[Json, Dialect]] = {
    "/v1/chat/completions": (CHAT_BODY, CHAT_FORM),
    "/v1/messages": (MESSAGES_BODY, MESSAGES_FORM),
    "/v1/responses": (RESPONSES_BODY, RESPONSES_FORM),
    "/api/chat": (OLLAMA_BODY, OLLAMA_FORM),
    "/api/generate": (GENERATE_BODY, OLLAMA_FORM),
    "/v1/messages/count_tokens": (COUNT_BODY, MESSAGES_FORM),
    "/api/embed": (EMBED_BODY, OLLAMA_FORM),
    "/api/show": (SHOW_BODY, OLLAMA_FORM),
}
NAMES = sorted({name for body, _ in ENDPOINTS.values() for name in body})


class Deep:
    """A value of many levels, which is written by hand."""

    def __init__(self, level: str, levels: int) -> None:
        close = {"[": "]", '{"a":': "}"}[level]
        self.text = level * levels + "1" + close * levels


names = st.sampled_from(NAMES) | st.text(max_size=3)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10),
    st.sampled_from([2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400]),
    st.sampled_from([0.0, -0.0, 0.5, 1e300, -1e300, 5e-324, float("nan"), float("inf"), float("-inf")]),
    st.sampled_from(
        ["", "mock", "x", "auto", "user", "assistant", "text", "function", "\ud800", "a\x00b", "é😀", "\ud83d x"]
    ),
    st.sampled_from(["data:image/png;base64,", "data:,", "data:;base64,%%%", "[" * 2000, "x" * 5000]),
    st.text(max_size=10),
)
values = st.one_of(
    scalars,
    st.builds(Deep, st.sampled_from(["[", '{"a":']), st.sampled_from([20, 300, 900, 1100, 5000])),
    st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), inner)
        ),
        max_leaves=6,
    ),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value has values, itself not included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*path, key), *places(inner, (*path, key)))]


def parent_of(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        value = value[key]
    return value


def written(value: Any, twice: tuple[Any, ...] | None, path: tuple[Any, ...] = ()) -> str:
    """JSON text, with what JSON cannot say, and with the key at `twice` there twice."""
    if isinstance(value, Deep):
        return value.text
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)}:{written(inner, twice, (*path, key))}" for key, inner in value.items()]
        if twice and twice[:-1] == path:
            pairs.append(f"{json.dumps(twice[-1])}:1")
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(written(inner, twice, (*path, at)) for at, inner in enumerate(value)) + "]"
    return json.dumps(value)


@st.composite
def bodies(draw: st.DrawFn, valid: Json) -> bytes:
    """A valid body of which some values are others, are gone, or have company."""
    value = deepcopy({name: inner for name, inner in valid.items() if name == "model" or draw(st.integers(0, 3))})
    for _ in range(draw(st.integers(0, 3))):
        known = places(value)
        if not known:
            break
        place = draw(st.sampled_from(known))
        parent, key = parent_of(value, place), place[-1]
        match draw(st.sampled_from(["replace", "remove", "add", "move", "repeat"])):
            case "replace":
                parent[key] = draw(values)
            case "remove":
                del parent[key]
            case "add" if isinstance(parent, dict):
                parent[draw(names)] = draw(values)
            case "move":
                other = draw(st.sampled_from(known))
                with_other = parent_of(value, other)
                parent[key] = deepcopy(with_other[other[-1]])
            case "repeat" if isinstance(parent, list):
                parent.append(deepcopy(parent[key]))
    objects = [place for place in places(value) if isinstance(place[-1], str)]
    twice = draw(st.none() | st.sampled_from(objects)) if objects and draw(st.integers(0, 9)) == 0 else None
    text = written(value, twice)
    if draw(st.integers(0, 9)) == 0:
        text = text[: draw(st.integers(0, len(text)))]
    return text.encode("utf-8", "surrogatepass")


class Caller:
    """Sends requests, one after the other, from a thread of its own."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc
        self._connection = http.client.HTTPConnection(self._host, timeout=DEADLINE)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Raises TimeoutError when nothing comes."""
        headers = {"Content-Type": "application/json", "Authorization": "Bearer k"}
        try:
            self._connection.request("POST", path, body, headers)
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException:
            self._connection.close()
            raise


def tries(caller: Caller, path: str) -> None:
    """Raises AssertionError for a body that is not answered as it should be."""
    valid, dialect = ENDPOINTS[path]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(bodies(valid))
    def run(body: bytes) -> None:
        status, answer = caller.post(path, body)
        if status >= 400:
            message = dialect.error_message(answer)
            assert status < 500 or "upstream" in message, (status, answer)
        else:
            assert status == 200

    run()


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_any_body_is_answered(stage: Stage, path: str) -> None:
    """Whatever is wrong in a body, it is answered or refused in the endpoint's form, and the gateway goes on."""
    answers = {
        CHAT: PLAIN[CHAT],
        "/tokenize": Given(b'{"count": 5}'),
        "/v1/embeddings": Given(json.dumps(VECTORS).encode()),
        "/v1/completions": Given(json.dumps(COMPLETION).encode()),
    }
    upstream = NativeUpstream(answers, {**answers, CHAT: STREAMS[CHAT]})
    async with upstream.serving():
        client = await stage.gateway(upstream.url, max_body=LIMIT)
        await asyncio.to_thread(tries, Caller(client.gateway.url), path)
        for dialect, stream in CALLERS:
            answer = await client.post(dialect.body(Question("are you there?"), stream), dialect.path)
            assert answer.status == 200
    assert upstream.asked
