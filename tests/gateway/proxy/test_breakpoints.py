"""A client's breakpoints for prompt caching, at upstreams that have only chat completions."""

from typing import Any

import msgspec
import pytest

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Client
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import Connection, json_reply

MARK = {"cache_control": {"type": "ephemeral"}}
FIELDS = {
    "model": "mock",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "Be brief.", **MARK}],
    "tools": [{"name": "t", "input_schema": {"type": "object", "properties": {"cache_control": {}}}, **MARK}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi", **MARK}]}],
}
ANSWER = b'{"choices":[{"index":0,"message":{"content":"hi"},"finish_reason":"stop"}]}'
REFUSAL = b'{"error":{"message":"Extra inputs are not permitted: cache_control","type":"invalid_request_error"}}'


async def ask(client: Client, **fields: Any) -> Any:
    return await client.send("POST", "/v1/messages", msgspec.json.encode({**FIELDS, **fields}))


async def test_breakpoints_are_passed_on(stage: Stage) -> None:
    """An upstream that takes them gets each where the client has put it."""
    mock: MockUpstream = await stage.mock()
    assert (await ask(await stage.gateway(mock))).status == 200
    system, user = mock.received[0].fields["messages"]
    assert system["content"] == [{"type": "text", "text": "Be brief.", **MARK}]
    assert user["content"] == [{"type": "text", "text": "hi", **MARK}]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_upstream_that_refuses_them_is_asked_without(stage: Stage, stream: bool) -> None:
    """The refusal is remembered; the schema of a tool keeps its own field of that name."""
    refused = 0

    async def converse(connection: Connection) -> None:
        nonlocal refused
        sent = msgspec.json.decode(connection.body)
        marked = b'"cache_control":{"type"' in connection.body
        refused += marked
        assert sent["tools"][0]["function"]["parameters"] == FIELDS["tools"][0]["input_schema"]  # type: ignore[index]
        status = b"400 Bad Request" if marked else b"200 OK"
        await connection.send(json_reply(REFUSAL if marked else ANSWER, status=status))

    client = await stage.gateway(await stage.raw(converse))
    answers = [await ask(client, stream=stream, max_tokens=number) for number in (1, 2, 3)]
    assert [answer.status for answer in answers] == [200] * 3
    assert refused == 1


async def test_marked_and_unmarked_requests_share_an_answer(stage: Stage) -> None:
    """The breakpoints are no part of the key."""
    client = await stage.gateway(await stage.mock(Reply(text="fine")))
    await ask(client)
    unmarked = msgspec.json.decode(msgspec.json.encode(FIELDS).replace(b',"cache_control":{"type":"ephemeral"}', b""))
    assert (await ask(client, **unmarked)).cache == "hit"
