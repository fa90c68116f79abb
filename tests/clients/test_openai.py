"""The `openai` libraries for Python (sync and async) and Node.js, as apps use them: only the base URL is Keepgate's."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from gateway.upstreams.mock import Reply
from tests.clients.node import Node, NodeClient
from tests.clients.python import AsyncPythonClient, SyncPythonClient
from tests.gateway.client import Client, assemble
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, json_reply

CREATE = "chat.completions.create"
RETRY_SOON = {"retry-after-ms": "10"}


class LibraryClient(Protocol):
    """A client library; `call` tells what a program would have seen: {value, headers}, {chunks} or {error}."""

    async def call(
        self,
        path: str,
        params: Any = None,
        *,
        headers: dict[str, str] | None = None,
        abort_after: int | None = None,
    ) -> dict[str, Any]: ...


Library = Callable[..., LibraryClient]


@pytest.fixture(params=["python sync", "python async", "node"])
def library(request: pytest.FixtureRequest, node: Node) -> Library:
    """Makes a client of a gateway, with the library's own defaults."""

    def make(gateway: Client, key: str = "sk-test") -> LibraryClient:
        url = f"{gateway.gateway.url}/v1"
        match request.param:
            case "node":
                return NodeClient(node, baseURL=url, apiKey=key)
            case "python sync":
                return SyncPythonClient(base_url=url, api_key=key)
        return AsyncPythonClient(base_url=url, api_key=key)

    return make


def chat(content: str = "Say it.", **fields: Any) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": content}], **fields}


async def outcome(call: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """What a successful call brought."""
    seen = await call
    assert "error" not in seen, seen
    return seen


async def test_an_answer_is_computed_once(stage: Stage, library: Library) -> None:
    """The second time the same object comes from the cache, and the headers say so."""
    mock = await stage.mock(Reply(text="It is said."))
    client = library(await stage.gateway(mock))
    first = await outcome(client.call(CREATE, chat()))
    second = await outcome(client.call(CREATE, chat()))
    assert first["value"]["choices"][0]["message"]["content"] == "It is said."
    assert second["value"] == first["value"]
    assert [seen["headers"]["x-keepgate-cache"] for seen in (first, second)] == ["miss", "hit"]
    assert second["headers"]["cache-status"].startswith("keepgate; hit")
    assert second["headers"]["age"].isdecimal()
    assert len(mock.received) == 1
    assert mock.received[0].headers["Authorization"] == "Bearer sk-test"
    assert mock.received[0].fields == chat()


async def test_legacy_completions(stage: Stage, library: Library) -> None:
    """/v1/completions, whole and as a stream, from one entry."""
    mock = await stage.mock(Reply(text="and so on"))
    client = library(await stage.gateway(mock))
    params = {"model": "mock", "prompt": "Once upon a time"}
    whole = await outcome(client.call("completions.create", params))
    assert whole["value"]["choices"][0]["text"] == "and so on"
    streamed = await outcome(client.call("completions.create", {**params, "stream": True}))
    assert "".join(choice["text"] for chunk in streamed["chunks"] for choice in chunk["choices"]) == "and so on"
    assert len(mock.received) == 1


@pytest.mark.parametrize("include_usage", [False, True])
async def test_streams(stage: Stage, library: Library, include_usage: bool) -> None:
    """A stream says what the whole answer says, fresh and from the cache; usage comes where it was asked for."""
    mock = await stage.mock(Reply(text="one two three four"))
    client = library(await stage.gateway(mock))
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if include_usage else {}
    # The mock, as many servers do, leaves usage out where it is not asked for, and such an answer has none to tell.
    for _ in range(2):
        chunks = (await outcome(client.call(CREATE, chat(stream=True, **options))))["chunks"]
        choice = assemble(chunks)["choices"][0]
        assert choice["message"]["content"] == "one two three four"
        assert choice["finish_reason"] == "stop"
        with_usage = [chunk for chunk in chunks if chunk.get("usage")]
        assert len(with_usage) == include_usage
        if include_usage:
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert len(mock.received) == 1
    whole = await outcome(client.call(CREATE, chat()))
    assert whole["value"]["choices"][0]["message"]["content"] == "one two three four"


async def test_the_stream_helper_puts_an_answer_together(stage: Stage, library: Library) -> None:
    """The library's own assembly of a stream agrees with the answer in one piece."""
    mock = await stage.mock(Reply(text="one two three four"))
    client = library(await stage.gateway(mock))
    for _ in range(2):
        final = (await outcome(client.call("chat.completions.stream", chat())))["value"]
        assert final["choices"][0]["message"]["content"] == "one two three four"
        assert final["choices"][0]["finish_reason"] == "stop"
    assert len(mock.received) == 1


async def test_tools(stage: Stage, library: Library) -> None:
    """Calls of tools arrive whole, in one piece, as a stream and through the library's helper, fresh and cached."""
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
        {"id": "call_2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
    ]
    mock = await stage.mock(Reply(message={"content": None, "tool_calls": calls}, finish_reason="tool_calls"))
    client = library(await stage.gateway(mock))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    asked = chat(tools=tools, tool_choice="auto", parallel_tool_calls=True)
    for _ in range(2):
        chunks = (await outcome(client.call(CREATE, {**asked, "stream": True})))["chunks"]
        choice = assemble(chunks)["choices"][0]
        assert choice["message"]["tool_calls"] == calls
        assert choice["finish_reason"] == "tool_calls"
    whole = (await outcome(client.call(CREATE, asked)))["value"]["choices"][0]
    assert whole["message"]["tool_calls"] == calls
    helped = (await outcome(client.call("chat.completions.stream", asked)))["value"]["choices"][0]
    assert [call["function"]["arguments"] for call in helped["message"]["tool_calls"]] == ['{"city": "Köln"}', "{}"]
    assert len(mock.received) == 1
    assert mock.received[0].fields["tools"] == tools


async def test_choices_logprobs_and_fields_of_other_servers(stage: Stage, library: Library) -> None:
    """Nothing of an answer is lost on its way through the cache."""
    token = {"token": "ja", "logprob": -0.5, "bytes": [106, 97], "top_logprobs": []}
    logprobs = {"content": [token], "refusal": None}
    message = {"role": "assistant", "content": "ja", "reasoning_content": "Hm.", "refusal": None}
    choices = [{"index": n, "message": message, "logprobs": logprobs, "finish_reason": "stop"} for n in range(3)]
    usage = {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    details = {"prompt_tokens_details": {"cached_tokens": 1}, "completion_tokens_details": {"reasoning_tokens": 2}}
    base = {"id": "chatcmpl-9", "object": "chat.completion", "created": 7, "model": "mock", "system_fingerprint": "f"}
    body = {**base, "choices": choices, "usage": {**usage, **details}}
    client = library(await stage.gateway(await stage.mock(Reply(body=body))))
    asked = chat(n=3, logprobs=True, top_logprobs=0, temperature=0, seed=7)
    for _ in range(2):
        assert (await outcome(client.call(CREATE, asked)))["value"] == body
    streamed = assemble((await outcome(client.call(CREATE, {**asked, "stream": True})))["chunks"])
    assert streamed["choices"] == choices


async def test_models(stage: Stage, library: Library) -> None:
    """The list, one of them, and one that is not there."""
    client = library(await stage.gateway(await stage.mock(models=("mock", "owner/other"))))
    listed = (await outcome(client.call("models.list")))["value"]
    assert [model["id"] for model in listed] == ["mock", "owner/other"]
    found = (await outcome(client.call("models.retrieve", "mock")))["value"]
    assert (found["id"], found["object"]) == ("mock", "model")
    error = (await client.call("models.retrieve", "absent"))["error"]
    assert (error["name"], error["status"], error["code"]) == ("NotFoundError", 404, "model_not_found")
    assert "absent" in error["message"]


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (403, "PermissionDeniedError"),
        (404, "NotFoundError"),
        (422, "UnprocessableEntityError"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstreams_refusal_is_the_librarys_exception(
    stage: Stage, library: Library, status: int, name: str, stream: bool
) -> None:
    """Class, message, param and code as if the upstream had been called directly; a refusal is never cached."""
    error = {"message": "No such thing.", "type": "invalid_request_error", "param": "messages", "code": "nope"}
    mock = await stage.mock(Reply(status=status, error=error))
    client = library(await stage.gateway(mock))
    for _ in range(2):
        seen = (await client.call(CREATE, chat(stream=stream)))["error"]
        assert (seen["name"], seen["status"], seen["param"], seen["code"]) == (name, status, "messages", "nope")
        assert "No such thing." in seen["message"]
    assert len(mock.received) == 2


async def test_the_gateways_own_refusal_is_the_librarys_exception(stage: Stage, library: Library) -> None:
    """What the gateway cannot read, and what it has not got, in OpenAI's form."""
    mock = await stage.mock()
    client = library(await stage.gateway(mock))
    seen = (await client.call(CREATE, {**chat(), "stream_options": "yes"}))["error"]
    assert (seen["name"], seen["status"], seen["param"]) == ("BadRequestError", 400, "stream_options")
    seen = (await client.call(CREATE, {**chat(), "model": ""}))["error"]
    assert (seen["name"], seen["param"]) == ("BadRequestError", "model")
    assert mock.received == []


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_passing_failure_is_retried(stage: Stage, library: Library, status: int) -> None:
    """With the library's own default; the retry's answer is kept, the failure is not."""
    failure = {"message": "Busy.", "type": "server_error", "param": None, "code": None}
    mock = await stage.mock(Reply(status=status, headers=RETRY_SOON, error=failure))
    client = library(await stage.gateway(mock))
    asking = asyncio.create_task(client.call(CREATE, chat()))
    await mock.wait_for(1)
    mock.replies = [Reply(text="Now.")]
    assert (await outcome(asking))["value"]["choices"][0]["message"]["content"] == "Now."
    again = await outcome(client.call(CREATE, chat()))
    assert again["headers"]["x-keepgate-cache"] == "hit"
    assert len(mock.received) == 2


async def test_a_failure_that_stays_is_told_after_the_retries(stage: Stage, library: Library) -> None:
    """Two retries are the library's default: three requests reach the upstream, none is answered by another's error."""
    failure = {"message": "Slow down.", "type": "rate_limit_error", "param": None, "code": "rate_limited"}
    mock = await stage.mock(Reply(status=429, headers=RETRY_SOON, error=failure))
    client = library(await stage.gateway(mock))
    seen = (await client.call(CREATE, chat()))["error"]
    assert (seen["name"], seen["status"], seen["code"]) == ("RateLimitError", 429, "rate_limited")
    assert len(mock.received) == 3


async def test_a_connection_cut_before_the_answer_is_retried(stage: Stage, library: Library) -> None:
    """An upstream that hangs up is a 502, which the library takes as an invitation to try again."""
    answer = b'{"id":"c","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,"message":'
    answer += b'{"role":"assistant","content":"Here."},"logprobs":null,"finish_reason":"stop"}]}'
    hung_up = 0

    async def hang_up_twice(connection: Connection) -> None:
        nonlocal hung_up
        hung_up += 1
        if hung_up > 2:  # the gateway itself asks once more where a connection was closed without a word
            await connection.send(json_reply(answer))

    client = library(await stage.gateway(await stage.raw(hang_up_twice)))
    seen = await outcome(client.call(CREATE, chat()))
    assert seen["value"]["choices"][0]["message"]["content"] == "Here."
    assert hung_up == 3


async def test_a_stream_that_breaks_raises(stage: Stage, library: Library) -> None:
    """What came before it is there; the break is an exception, not an end; nothing of it is cached."""
    mock = await stage.mock(Reply(text="one two three four", cut_after=3))
    client = library(await stage.gateway(mock))
    for _ in range(2):
        seen = await client.call(CREATE, chat(stream=True))
        assert seen["error"]["name"] == "APIError"
        assert seen["error"]["code"] == "upstream_cut"
        assert "broke the connection" in seen["error"]["message"]
        assert seen["chunks"]
    assert len(mock.received) == 2


async def test_leaving_a_stream_cancels_the_upstream(stage: Stage, library: Library) -> None:
    """An app that stops reading stops the computation, and the half answer is not kept."""
    mock = await stage.mock(Reply(text="one two three four"))
    client = library(await stage.gateway(mock))
    mock.hold.clear()  # only the first event goes out
    seen = await client.call(CREATE, chat(stream=True), abort_after=1)
    assert len(seen["chunks"]) == 1
    await mock.wait_for_cancelled(1)
    mock.hold.set()
    again = await outcome(client.call(CREATE, chat()))
    assert again["headers"]["x-keepgate-cache"] == "miss"


async def test_requests_say_how_the_cache_takes_part(stage: Stage, library: Library) -> None:
    """Cache-Control of a single request, through the library's way to add headers."""
    mock = await stage.mock(Reply(text="old"))
    client = library(await stage.gateway(mock))
    await outcome(client.call(CREATE, chat()))
    mock.replies = [Reply(text="new")]
    fresh = await outcome(client.call(CREATE, chat(), headers={"Cache-Control": "no-cache"}))
    assert fresh["value"]["choices"][0]["message"]["content"] == "new"
    kept = await outcome(client.call(CREATE, chat()))
    assert kept["value"]["choices"][0]["message"]["content"] == "new"
    absent = (await client.call(CREATE, chat("never asked"), headers={"Cache-Control": "only-if-cached"}))["error"]
    assert (absent["name"], absent["status"], absent["code"]) == ("InternalServerError", 504, "not_cached")


async def test_another_key_is_another_tenant(stage: Stage, library: Library) -> None:
    """What one key was answered is computed anew for another."""
    mock = await stage.mock()
    gateway = await stage.gateway(mock)
    for key, cache in (("sk-a", "miss"), ("sk-b", "miss"), ("sk-a", "hit")):
        seen = await outcome(library(gateway, key=key).call(CREATE, chat()))
        assert seen["headers"]["x-keepgate-cache"] == cache


async def test_the_libraries_share_entries(stage: Stage, node: Node) -> None:
    """One app in Python and one in JavaScript: what one asked is a hit for the other, whatever headers they send."""
    mock = await stage.mock()
    gateway = await stage.gateway(mock)
    url = f"{gateway.gateway.url}/v1"
    clients: list[LibraryClient] = [
        NodeClient(node, baseURL=url, apiKey="sk-test"),
        AsyncPythonClient(base_url=url, api_key="sk-test"),
        SyncPythonClient(base_url=url, api_key="sk-test"),
    ]
    seen = [await outcome(client.call(CREATE, chat())) for client in clients]
    assert [one["headers"]["x-keepgate-cache"] for one in seen] == ["miss", "hit", "hit"]
    assert seen[0]["value"] == seen[1]["value"] == seen[2]["value"]
    (received,) = mock.received
    assert any(name.lower().startswith("x-stainless") for name in received.headers)
