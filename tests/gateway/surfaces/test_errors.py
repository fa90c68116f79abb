"""Whatever goes wrong, each client gets an error in its own form of API, nothing is stored, and the next is served."""

import json
import socket
from typing import Any

import anthropic
import msgspec
import ollama
import openai
import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Client
from tests.gateway.conftest import LIMIT, Stage
from tests.gateway.raw_upstream import (
    CHUNKED_EVENT_STREAM,
    EVENT_STREAM,
    Connection,
    Conversation,
    chunked,
    json_reply,
    saying,
)
from tests.gateway.surfaces.dialects import (
    CALLER_NAMES,
    CALLERS,
    DIALECTS,
    TRANSLATED,
    Dialect,
    Question,
    completion,
    names,
)
from tests.gateway.wire import wire

callers = pytest.mark.parametrize(("dialect", "stream"), CALLERS, ids=CALLER_NAMES)
dialects = pytest.mark.parametrize("dialect", DIALECTS, ids=names(DIALECTS))
translated = pytest.mark.parametrize("dialect", TRANSLATED, ids=names(TRANSLATED))

GOOD = json.dumps(completion({"content": "Sunny."})).encode()


async def computed_next(client: Client, dialect: Dialect) -> str:
    """Whether the question of this test is in the cache. Its upstream must be able to answer now."""
    answer = await client.post(dialect.body(Question()), dialect.path)
    assert answer.status == 200, answer.body
    return answer.cache


OPENAI_ERROR = {"message": "The upstream says no.", "type": "odd_type", "param": "x", "code": "odd_code"}
BODIES: dict[str, tuple[bytes, str]] = {
    "OpenAI's": (json.dumps({"error": OPENAI_ERROR}).encode(), "The upstream says no."),
    "a text": (b'{"error": "The upstream says no."}', "The upstream says no."),
    "Anthropic's": (
        b'{"type": "error", "error": {"type": "t", "message": "The upstream says no."}}',
        "The upstream says no.",
    ),
    "FastAPI's": (b'{"detail": "The upstream says no."}', "The upstream says no."),
    "vLLM's old": (b'{"object": "error", "message": "The upstream says no.", "code": 400}', "The upstream says no."),
    "HTML": (b"<html><h1>Bad gateway</h1></html>", "status"),
    "nothing": (b"", "status"),
    "no text": (b"\xff\xfe\x00", "status"),
    "JSON cut off": (b'{"error": {"message": "The ups', "status"),
    "a list": (b"[1, 2]", "status"),
    "null": (b"null", "status"),
    "odd types": (b'{"error": {"message": {"a": 1}, "type": [], "code": 7, "param": false}}', "status"),
    "deep": (b'{"error": ' * 5000 + b"1" + b"}" * 5000, "status"),
}


@callers
@pytest.mark.parametrize(("body", "message"), BODIES.values(), ids=BODIES.keys())
async def test_an_error_of_the_upstream(
    stage: Stage, body: bytes, message: str, dialect: Dialect, stream: bool
) -> None:
    """An upstream's error keeps its status and its message in the client's form, whatever form it came in."""
    upstream = await stage.raw(saying(json_reply(body, b"Retry-After: 7", status=b"429 Slow Down")))
    client = await stage.gateway(upstream)
    refused = await client.post(dialect.body(Question(), stream), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert refused.status == 429
    assert refused.headers["Retry-After"] == "7"
    if dialect.name == "chat":
        assert refused.body == body
    else:
        assert refused.headers["Content-Type"] == "application/json"
        assert message in dialect.error_message(refused.body)
    assert await computed_next(client, dialect) == "miss"


@callers
@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 422, 500, 501, 502, 503, 529, 599])
async def test_the_status_of_an_error(stage: Stage, status: int, dialect: Dialect, stream: bool) -> None:
    """An upstream's status reaches the client as it is, and the next request is served."""
    mock = await stage.mock(Reply(status=status, error=OPENAI_ERROR))
    client = await stage.gateway(mock)
    refused = await client.post(dialect.body(Question(), stream), dialect.path)
    mock.replies[:] = [Reply(text="alive")]

    assert refused.status == status
    assert dialect.error_message(refused.body) == "The upstream says no."
    assert await computed_next(client, dialect) == "miss"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@translated
@pytest.mark.parametrize("status", [b"201 Created", b"204 No Content", b"301 Moved", b"304 Not Modified", b"307 Moved"])
async def test_a_status_that_is_neither_success_nor_error(
    stage: Stage, status: bytes, dialect: Dialect, stream: bool
) -> None:
    """What is neither an answer nor an error is 502 for a client of another form, which would read it as an answer."""
    upstream = await stage.raw(saying(json_reply(b"", b"Location: http://127.0.0.1:9/", status=status)))
    client = await stage.gateway(upstream)
    refused = await client.post(dialect.body(Question(), stream), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert refused.status == 502
    assert status[:3].decode() in dialect.error_message(refused.body)
    assert "Location" not in refused.headers
    assert await computed_next(client, dialect) == "miss"


@callers
async def test_an_upstream_that_cannot_be_reached(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Without a connection to any upstream the answer is 502 and says which could not be reached."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        client = await stage.gateway(f"http://127.0.0.1:{port}/v1")
        refused = await client.post(dialect.body(Question(), stream), dialect.path)

    assert refused.status == 502
    assert f"127.0.0.1:{port}" in dialect.error_message(refused.body)


@callers
async def test_a_gateway_without_upstreams(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Before any upstream is known the answer is 503."""
    client = await stage.gateway()
    refused = await client.post(dialect.body(Question(), stream), dialect.path)

    assert refused.status == 503
    assert dialect.error_message(refused.body)


@callers
async def test_an_upstream_that_does_not_begin(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """An upstream that is silent for too long is 504."""

    async def silent(connection: Connection) -> None:
        await connection.closed()

    upstream = await stage.raw(silent)
    client = await stage.gateway(upstream, timeouts={"first_byte": 0.2})
    refused = await client.post(dialect.body(Question(), stream), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert refused.status == 504
    assert dialect.error_message(refused.body)
    assert await computed_next(client, dialect) == "miss"


@callers
async def test_only_from_the_cache(served: tuple[Client, MockUpstream], dialect: Dialect, stream: bool) -> None:
    """`only-if-cached` is 504 without an entry, and calls no upstream."""
    client, mock = served
    refused = await client.post(dialect.body(Question(), stream), dialect.path, Cache_Control="only-if-cached")

    assert refused.status == 504
    assert "cache" in dialect.error_message(refused.body)
    assert mock.received == []


def altered(dialect: Dialect, **fields: Any) -> bytes:
    return msgspec.json.encode({**dialect.body(Question()), **fields})


BAD_BODIES: dict[str, Any] = {
    "nothing": lambda _: b"",
    "no JSON": lambda _: b"model=mock",
    "cut off": lambda dialect: altered(dialect)[:-1],
    "a list": lambda _: b"[]",
    "null": lambda _: b"null",
    "NaN": lambda dialect: altered(dialect)[:-1] + b',"x":NaN}',
    "no UTF-8": lambda dialect: altered(dialect)[:-1] + b',"x":"\xff"}',
    "a lone surrogate": lambda dialect: altered(dialect)[:-1] + b',"x":"\\ud800"}',
    "a key twice": lambda dialect: altered(dialect)[:-1] + b',"model":"mock"}',
    "deep": lambda dialect: altered(dialect)[:-1] + b',"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "no model": lambda dialect: altered(dialect, model=None),
    "a model that is no text": lambda dialect: altered(dialect, model=["mock"]),
    "an empty model": lambda dialect: altered(dialect, model=""),
    "stream as a text": lambda dialect: altered(dialect, stream="yes"),
}


@dialects
@pytest.mark.parametrize("bad", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_a_bad_body(served: tuple[Client, MockUpstream], bad: Any, dialect: Dialect) -> None:
    """A body that cannot be read is 400 in the client's form, and calls no upstream."""
    client, mock = served
    refused = await client.post(bad(dialect), dialect.path)

    assert refused.status == 400
    assert refused.headers["Content-Type"] == "application/json"
    assert dialect.error_message(refused.body)
    assert mock.received == []


WRONG_FIELDS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "messages": [
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": 5}, "system"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"max_tokens": None}, "max_tokens"),
    ],
    "responses": [
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "function_call"}]}, "input[0].call_id"),
        ({"instructions": []}, "instructions"),
        ({"tools": {}}, "tools"),
        ({"text": "x"}, "text"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"messages": []}, "messages"),
    ],
    "ollama": [
        ({"messages": "hello"}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "images": ["data:x"]}]}, "messages[0].images[0]"),
        ({"options": []}, "options"),
        ({"format": "xml"}, "format"),
        ({"think": 5}, "think"),
    ],
}
_WRONG = [(dialect, fields, name) for dialect in TRANSLATED for fields, name in WRONG_FIELDS[dialect.name]]


@pytest.mark.parametrize(
    ("dialect", "fields", "name"), _WRONG, ids=[f"{dialect.name} {json.dumps(fields)}" for dialect, fields, _ in _WRONG]
)
async def test_a_field_of_a_wrong_type(
    served: tuple[Client, MockUpstream], dialect: Dialect, fields: dict[str, Any], name: str
) -> None:
    """A field that cannot be translated is 400, and the message names it."""
    client, mock = served
    refused = await client.post(altered(dialect, **fields), dialect.path)

    assert refused.status == 400
    assert f"'{name}'" in dialect.error_message(refused.body)
    assert mock.received == []


@dialects
async def test_a_body_that_is_too_large(served: tuple[Client, MockUpstream], dialect: Dialect) -> None:
    """A body over the limit is 413."""
    client, mock = served
    refused = await client.post(altered(dialect, x="x" * LIMIT), dialect.path)

    assert refused.status == 413
    assert dialect.error_message(refused.body)
    assert mock.received == []


@dialects
async def test_a_client_that_is_too_slow(served: tuple[Client, MockUpstream], dialect: Dialect) -> None:
    """A body that does not arrive in time is 408."""
    client, mock = served
    async with wire(client) as connection:
        head = (
            f"POST {dialect.path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n"
        )
        await connection.send(head.encode() + b'{"model":')
        refused = await connection.answer()

    assert refused.status == 408
    assert dialect.error_message(refused.body)
    assert mock.received == []


@pytest.mark.parametrize(
    ("method", "path", "status", "dialect"),
    [
        ("GET", "/api/chat", 405, DIALECTS[3]),
        ("POST", "/api/nothing", 404, DIALECTS[3]),
        ("DELETE", "/api/delete", 404, DIALECTS[3]),
        ("GET", "/v1/responses/resp_none", 404, DIALECTS[2]),
        ("DELETE", "/v1/responses/resp_none", 404, DIALECTS[2]),
        ("GET", "/v1/responses/resp_none/input_items", 404, DIALECTS[2]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
async def test_a_path_that_there_is_not(
    served: tuple[Client, MockUpstream], method: str, path: str, status: int, dialect: Dialect
) -> None:
    """What a form of API does not have here is an error in this form."""
    client, _ = served
    refused = await client.send(method, path, {"model": "mock"} if method == "POST" else None)

    assert refused.status == status
    assert dialect.error_message(refused.body)


def chunk(delta: Any = None, finish_reason: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": "Sun"} if delta is None else delta, "finish_reason": finish_reason}
    value = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": [choice], **fields}
    return b"data: " + json.dumps(value).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
END = chunk({}, "stop")


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


async def cut(connection: Connection) -> None:
    await connection.send_apart(CHUNKED_EVENT_STREAM, chunked(chunk()))
    connection.cut()


async def idle(connection: Connection) -> None:
    await connection.send_apart(EVENT_STREAM, chunk())
    await connection.closed()


BROKEN_STREAMS: dict[str, tuple[Conversation, str]] = {
    "cut": (cut, "upstream"),
    "silent": (idle, "upstream"),
    "an error": (saying(EVENT_STREAM, chunk(), event({"error": OPENAI_ERROR})), "The upstream says no."),
    "an error as a text": (saying(EVENT_STREAM, chunk(), event({"error": "It broke."}), DONE), "It broke."),
    "an error at once": (saying(EVENT_STREAM, event({"error": OPENAI_ERROR}), DONE), "The upstream says no."),
    "an error event": (
        saying(EVENT_STREAM, chunk(), b"event: error\n" + event({"error": OPENAI_ERROR})),
        "The upstream says no.",
    ),
    "garbage": (saying(EVENT_STREAM, chunk(), b"data: garbage\n\n", END, DONE), ""),
    "half an event": (saying(EVENT_STREAM, chunk(), END[:40]), ""),
    "no end": (saying(EVENT_STREAM, chunk()), ""),
    "done at once": (saying(EVENT_STREAM, DONE), ""),
    "a list": (saying(EVENT_STREAM, chunk(), event([1]), END, DONE), ""),
    "choices as a text": (saying(EVENT_STREAM, chunk(), chunk(choices="x"), END, DONE), ""),
    "a choice as a number": (saying(EVENT_STREAM, chunk(), chunk(choices=[5]), END, DONE), ""),
    "a delta as a list": (saying(EVENT_STREAM, chunk(), chunk([1])), ""),
    "content as an object": (saying(EVENT_STREAM, chunk(), chunk({"content": {"a": 1}}), chunk({"content": [5]})), ""),
    "calls as a number": (saying(EVENT_STREAM, chunk(), chunk({"tool_calls": 5}), chunk({"tool_calls": [5]})), ""),
    "a call of odd types": (
        saying(EVENT_STREAM, chunk({"tool_calls": [{"index": "x", "function": 5, "id": {}}]}), chunk()),
        "",
    ),
    "no UTF-8": (saying(EVENT_STREAM, chunk(), b'data: {"choices": "\xff"}\n\n', END, DONE), ""),
    "deep": (saying(EVENT_STREAM, chunk(), b'data: {"choices": ' + b"[" * 20_000 + b"]" * 20_000 + b"}\n\n"), ""),
}


@translated
@pytest.mark.parametrize(("conversation", "message"), BROKEN_STREAMS.values(), ids=BROKEN_STREAMS.keys())
async def test_a_stream_that_breaks(stage: Stage, conversation: Conversation, message: str, dialect: Dialect) -> None:
    """A translated stream that breaks ends with an error in the client's form, and not as a whole one does."""
    upstream = await stage.raw(conversation)
    client = await stage.gateway(upstream, timeouts={"idle": 0.2})
    broken = await client.post(dialect.body(Question(), True), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert broken.status == 200
    said = dialect.error_event(broken.body)
    assert said is not None, broken.body
    assert message in said
    assert not dialect.is_whole(broken.body)
    assert await computed_next(client, dialect) == "miss"


@pytest.mark.parametrize("end", [DONE, END], ids=["done without a reason", "a reason without done"])
@translated
async def test_a_stream_that_ends_in_its_own_way(stage: Stage, end: bytes, dialect: Dialect) -> None:
    """A stream that says only in one way that it is over is whole for the client, and is not stored."""
    upstream = await stage.raw(saying(EVENT_STREAM, chunk(), end))
    client = await stage.gateway(upstream)
    answer = await client.post(dialect.body(Question(), True), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert dialect.error_event(answer.body) is None
    assert dialect.is_whole(answer.body)
    assert b"Sun" in answer.body
    assert await computed_next(client, dialect) == "miss"


@translated
@pytest.mark.parametrize("conversation", [one for one, _ in BROKEN_STREAMS.values()], ids=BROKEN_STREAMS.keys())
async def test_a_stream_that_nobody_asked_for_and_that_breaks(
    stage: Stage, conversation: Conversation, dialect: Dialect
) -> None:
    """Of a server that streams unasked, a client that does not stream gets no half of an answer."""
    upstream = await stage.raw(conversation)
    client = await stage.gateway(upstream, timeouts={"idle": 0.2})
    refused = await client.post(dialect.body(Question(), False), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert refused.status in (502, 504)
    assert dialect.error_message(refused.body)
    assert await computed_next(client, dialect) == "miss"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@translated
async def test_a_stream_of_nothing(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """A stream that ends before its first event is 502 for every client, whose response has not begun."""
    upstream = await stage.raw(saying(EVENT_STREAM))
    client = await stage.gateway(upstream)
    refused = await client.post(dialect.body(Question(), stream), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert refused.status == 502
    assert dialect.error_message(refused.body)
    assert await computed_next(client, dialect) == "miss"


NO_ANSWERS: dict[str, bytes] = {
    "HTML": b"<html>Welcome</html>",
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a text": b'"hello"',
    "an empty object": b"{}",
    "another object": b'{"status": "ok"}',
    "an error": json.dumps({"error": OPENAI_ERROR}).encode(),
    "cut off": GOOD[:-5],
    "no UTF-8": GOOD.replace(b"Sunny", b"\xff\xfe"),
    "no choice": json.dumps({**json.loads(GOOD), "choices": []}).encode(),
    "choices as a text": json.dumps({**json.loads(GOOD), "choices": "x"}).encode(),
    "deep": b'{"choices": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@translated
@pytest.mark.parametrize("body", NO_ANSWERS.values(), ids=NO_ANSWERS.keys())
async def test_a_success_that_is_no_answer(stage: Stage, body: bytes, dialect: Dialect, stream: bool) -> None:
    """What an upstream sends with status 200 and is no chat completion is 502, for a client of another form."""
    upstream = await stage.raw(saying(json_reply(body)))
    client = await stage.gateway(upstream)
    refused = await client.post(dialect.body(Question(), stream), dialect.path)
    upstream.conversation = saying(json_reply(GOOD))

    assert refused.status == 502, refused.body
    assert dialect.error_message(refused.body)
    assert await computed_next(client, dialect) == "miss"


ODD_ANSWERS: dict[str, dict[str, Any]] = {
    "content as an object": completion({"content": {"a": 1}}),
    "content as a number": completion({"content": 5}),
    "content of odd parts": completion({"content": [1, {"type": "text", "text": 5}, {"type": {}}]}),
    "calls as a text": completion({"content": "x", "tool_calls": "x"}),
    "calls of odd types": completion({"content": None, "tool_calls": [5, {"function": 5}, {"id": {}, "function": {}}]}),
    "arguments that are no JSON": completion(
        {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{x"}}]}
    ),
    "a message as a text": {**completion({}), "choices": [{"index": 0, "message": "x", "finish_reason": "stop"}]},
    "usage as a text": {**completion({"content": "x"}), "usage": "much"},
    "usage of odd types": {**completion({"content": "x"}), "usage": {"prompt_tokens": "1", "completion_tokens": -5}},
    "huge usage": {**completion({"content": "x"}), "usage": {"prompt_tokens": 10**30, "completion_tokens": 1}},
    "an id as a list": {**completion({"content": "x"}), "id": []},
    "a model as an object": {**completion({"content": "x"}), "model": {}},
    "created as a text": {**completion({"content": "x"}), "created": "now"},
    "created far away": {**completion({"content": "x"}), "created": 10**300},
    "created at minus infinity": {**completion({"content": "x"}), "created": -1e300},
    "a finish reason as a number": completion({"content": "x"}, finish_reason=5),  # type: ignore[arg-type]
    "an unknown finish reason": completion({"content": "x"}, finish_reason="eos"),
    "no finish reason": completion({"content": "x"}, finish_reason=None),  # type: ignore[arg-type]
    "logprobs as a text": {
        **completion({}),
        "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop", "logprobs": "x"}],
    },
    "thoughts as a list": completion({"content": "x", "reasoning_content": [1]}),
    "fields of ours": {
        **completion({"content": "x"}),
        "anthropic_message": 5,
        "response": 7,
        "ollama": [],
        "anthropic": {},
    },
    "patches of ours": {**completion({"content": "x"}), "anthropic_message": [{"op": "x"}], "response": {"id": []}},
    "a refusal as a number": completion({"content": None, "refusal": 7}),
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@translated
@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS.keys())
async def test_an_odd_answer(stage: Stage, answer: dict[str, Any], dialect: Dialect, stream: bool) -> None:
    """An answer with odd types is rendered, or is the upstream's error; it is never a fault of the gateway."""
    upstream = await stage.raw(saying(json_reply(json.dumps(answer).encode())))
    client = await stage.gateway(upstream)
    given = [await client.post(dialect.body(Question(), streams), dialect.path) for streams in (stream, not stream)]
    upstream.conversation = saying(json_reply(GOOD))
    await computed_next(client, dialect)

    for answered in given:
        assert answered.status in (200, 502), answered.body
        if answered.status == 502:
            assert "upstream" in dialect.error_message(answered.body)


@callers
async def test_libraries_raise_their_errors(stage: Stage, dialect: Dialect, stream: bool) -> None:
    """Each client library raises the error of its own that belongs to the status, with the upstream's message."""
    mock = await stage.mock()
    client = await stage.gateway(mock)
    for status, name in [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (429, "RateLimitError"),
        (500, "InternalServerError"),
        (503, "InternalServerError"),
    ]:
        mock.replies[:] = [Reply(status=status, error=OPENAI_ERROR)]
        if dialect.name == "ollama":
            with pytest.raises(ollama.ResponseError) as raised:
                await dialect.ask(client, Question(), stream)
            assert (raised.value.status_code, raised.value.error) == (status, "The upstream says no.")
        else:
            library: Any = anthropic if dialect.name == "messages" else openai
            with pytest.raises(getattr(library, name), match="The upstream says no") as raised:
                await dialect.ask(client, Question(), stream)
            assert raised.value.status_code == status


@dialects
async def test_libraries_raise_their_errors_within_a_stream(stage: Stage, dialect: Dialect) -> None:
    """Each client library raises when a stream breaks, and says what the upstream said."""
    upstream = await stage.raw(saying(EVENT_STREAM, chunk(), event({"error": OPENAI_ERROR})))
    client = await stage.gateway(upstream)
    kinds = {"messages": anthropic.APIStatusError, "ollama": ollama.ResponseError}
    with pytest.raises(kinds.get(dialect.name, openai.APIError), match="The upstream says no"):
        await dialect.ask(client, Question(), True)
    upstream.conversation = cut
    with pytest.raises(kinds.get(dialect.name, openai.APIError), match="upstream"):
        await dialect.ask(client, Question(), True)
