"""No prompt, answer or credential of a client is in a log, whatever fails, at any endpoint."""

import contextlib
from typing import Any

import aiohttp
import msgspec
import pytest

from tests.gateway.conftest import SECRET, Stage
from tests.gateway.raw_upstream import CHUNKED_EVENT_STREAM, EVENT_STREAM, Connection, Conversation, json_reply, saying

pytestmark = pytest.mark.usefixtures("secret_is_not_logged")

MESSAGES = [{"role": "user", "content": SECRET}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "mock", "messages": MESSAGES},
    "/v1/completions": {"model": "mock", "prompt": SECRET},
    "/v1/embeddings": {"model": "mock", "input": SECRET},
    "/v1/responses": {"model": "mock", "input": SECRET},
    "/v1/messages": {"model": "mock", "max_tokens": 5, "messages": MESSAGES},
    "/v1/messages/count_tokens": {"model": "mock", "messages": MESSAGES},
    "/v1/generate": {"model": "mock", "prompt": SECRET},
    "/v1/generate/batch": {"model": "mock", "prompts": [SECRET]},
    "/v1/rerank": {"model": "mock", "query": SECRET, "documents": [SECRET]},
    "/v1/audio/speech": {"model": "mock", "input": SECRET, "voice": SECRET},
    "/v1/moderations": {"model": "mock", "input": SECRET},
    "/api/chat": {"model": "mock", "messages": MESSAGES},
    "/api/generate": {"model": "mock", "prompt": SECRET},
    "/api/embed": {"model": "mock", "input": SECRET},
    "/api/embeddings": {"model": "mock", "prompt": SECRET},
    "/api/show": {"model": SECRET},
    "/v1/files": {"purpose": SECRET},
    "/v1/batches": {"input_file_id": SECRET, "endpoint": SECRET},
    f"/v1/other/{SECRET}": {"model": "mock", "text": SECRET},
    f"/nowhere/{SECRET}?{SECRET}": {"text": SECRET},
}
SAID = SECRET.encode()


async def reset(connection: Connection) -> None:
    connection.cut()


FAILURES: dict[str, Conversation] = {
    "an error that quotes it": saying(json_reply(b'{"error":{"message":"%s"}}' % SAID, status=b"500 Failed")),
    "a refusal that quotes it": saying(json_reply(b'{"error":{"message":"%s"}}' % SAID, status=b"400 Bad Request")),
    "an object of another kind": saying(json_reply(b'{"choices":"%s"}' % SAID)),
    "no JSON": saying(json_reply(b"<html>" + SAID)),
    "no HTTP": saying(SAID + b"\r\n\r\n"),
    "a header with it that is none": saying(b"HTTP/1.1 200 OK\r\n" + SAID + b"\r\n\r\n"),
    "a stream that is cut": saying(CHUNKED_EVENT_STREAM + b'20\r\ndata: {"choices":[{"delta":{"con' + SAID),
    "a stream of something else": saying(EVENT_STREAM + b"data: " + SAID + b"\n\ndata: [DONE]\n\n"),
    "a reset": reset,
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_a_failing_upstream_leaves_no_prompt_in_a_log(stage: Stage, failure: Conversation) -> None:
    """At every endpoint, streamed and not, for an upstream that fails in this way."""
    upstream = await stage.raw(failure)
    for path, body in ENDPOINTS.items():
        client = (await stage.gateway(upstream)).tenant(SECRET)  # a new one, whose breaker is closed
        for fields in (body, {**body, "stream": True}):
            with contextlib.suppress(OSError, aiohttp.ClientError):  # an answer that was cut
                await client.post(fields, path)
    assert len(upstream.connections) > len(ENDPOINTS)


BROKEN = {
    "no JSON": SAID,
    "half a body": b'{"model":"mock","messages":[{"role":"user","content":"' + SAID,
    "a list": b'["' + SAID + b'"]',
    "bytes that are no text": b'{"model":"' + SAID + b'\xff"}',
    "a key twice": b'{"%s":1,"%s":2}' % (SAID, SAID),
    "no model": b'{"messages":"' + SAID + b'"}',
    "values of other types": msgspec.json.encode(
        {"model": "mock", "messages": {SECRET: SECRET}, "prompt": {SECRET: 1}, "input": {SECRET: 1}, "stream": SECRET}
    ),
    "a URL that is refused": msgspec.json.encode(
        {"model": "mock", "messages": [{"role": "user", "content": [{"image_url": f"http://{SECRET}/"}]}]}
    ),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN.keys())
async def test_a_body_that_is_refused_is_in_no_log(stage: Stage, body: bytes) -> None:
    """At every endpoint."""
    client = (await stage.gateway(await stage.mock())).tenant(SECRET)
    for path in ENDPOINTS:
        await client.post(body, path)
        await client.post(body, path, Cache_Control=SECRET, X_Keepgate_Max_Risk=SECRET, Content_Type=SECRET)
