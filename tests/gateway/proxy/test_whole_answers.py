"""Moderations, reranking, audio and images: answers that are functions of their requests, stored as they are."""

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import FormData

from gateway.upstreams.mock import MockUpstream, Reply
from tests.gateway.client import Client
from tests.gateway.conftest import Stage
from tests.gateway.raw_upstream import RawUpstream, json_reply, saying

SPEECH = bytes(range(256)) * 40
AUDIO = b"HTTP/1.1 200 OK\r\nContent-Type: audio/mpeg\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(SPEECH)


async def form(boundary_seed: bytes = b"", **fields: str) -> tuple[dict[str, str], bytes]:
    """The headers and the body of a form with a recording."""
    data = FormData(default_to_multipart=True)
    for name, value in fields.items():
        data.add_field(name, value)
    data.add_field("file", b"RIFF\0\r\n--" + boundary_seed, filename="a.wav", content_type="audio/wav")
    payload = data()
    return {"Content-Type": payload.headers["Content-Type"]}, await payload.as_bytes()


async def ask(client: Client, path: str, fields: dict[str, Any]) -> Any:
    return await client.send("POST", path, msgspec.json.encode(fields), {"Content-Type": "application/json"})


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score"])
async def test_results_are_computed_once(stage: Stage, path: str) -> None:
    """The second of two equal requests is answered from the cache, with the bytes of the first; another is not."""
    raw = await stage.raw(saying(json_reply(b'{"results": [{"flagged": false}]}')))
    client = await stage.gateway(raw)
    first, second = [await ask(client, path, {"model": "mock", "input": "x"}) for _ in range(2)]
    other = await ask(client, path, {"model": "mock", "input": "y"})

    assert [answer.cache for answer in (first, second, other)] == ["miss", "hit", "miss"]
    assert first.body == second.body == b'{"results": [{"flagged": false}]}'
    assert second.headers["Content-Type"] == "application/json"
    assert [connection.request_line for connection in raw.connections] == [f"POST {path} HTTP/1.1"] * 2


async def test_a_moderation_needs_no_model(stage: Stage) -> None:
    """A moderation whose client leaves the model to the upstream is computed once as well."""
    client = await stage.gateway(await stage.raw(saying(json_reply(b'{"results": [{"flagged": false}]}'))))
    assert [(await ask(client, "/v1/moderations", {"input": "x"})).cache for _ in range(2)] == ["miss", "hit"]


async def test_a_form_arrives_byte_for_byte_and_is_known_under_another_boundary(stage: Stage) -> None:
    """A transcription's body is relayed unchanged; the same recording in a form with another boundary is a hit."""
    raw = await stage.raw(saying(json_reply(b'{"text": "hello"}')))
    client = await stage.gateway(raw)
    (headers, body), (others, again) = [await form(model="mock", language="en") for _ in range(2)]
    first = await client.send("POST", "/v1/audio/transcriptions", body, headers)
    second = await client.send("POST", "/v1/audio/transcriptions", again, others)

    assert headers != others
    assert raw.connections[0].body == body
    assert f"Content-Type: {headers['Content-Type']}".encode() in raw.connections[0].head
    assert (first.cache, second.cache, second.body) == ("miss", "hit", b'{"text": "hello"}')


async def test_other_recordings_and_fields_are_other_requests(stage: Stage) -> None:
    """A form that differs in a field or in the recording gets an answer of its own."""
    raw = await stage.raw(saying(json_reply(b'{"text": "hello"}')))
    client = await stage.gateway(raw)
    forms = [await form(model="mock"), await form(model="mock", language="en"), await form(b"x", model="mock")]
    answers = [await client.send("POST", "/v1/audio/transcriptions", body, headers) for headers, body in forms]

    assert [answer.cache for answer in answers] == ["miss"] * 3


async def test_a_form_that_cannot_be_read_is_relayed(stage: Stage) -> None:
    """A form that is not what its Content-Type says is for the upstream to judge."""
    raw = await stage.raw(saying(json_reply(b'{"text": "hello"}')))
    client = await stage.gateway(raw)
    body = b"--b\nContent-Disposition: form-data; name=model\n\nmock\n--b--\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answers = [await client.send("POST", "/v1/audio/transcriptions", body, headers) for _ in range(2)]

    assert [(answer.status, answer.cache) for answer in answers] == [(200, "bypass")] * 2
    assert raw.connections[0].body == body


async def test_speech_is_stored_with_its_content_type(stage: Stage) -> None:
    """A recording of a text comes from the cache byte for byte, as the kind of audio that it is."""
    raw = await stage.raw(saying(AUDIO, SPEECH[:5000], SPEECH[5000:]))
    client = await stage.gateway(raw)
    fields = {"model": "mock", "input": "hello", "voice": "alloy"}
    first, second = [await ask(client, "/v1/audio/speech", fields) for _ in range(2)]

    assert (first.cache, second.cache) == ("miss", "hit")
    assert first.body == second.body == SPEECH
    assert second.headers["Content-Type"] == "audio/mpeg"
    entry = await client.get(f"/v1/cache/entries/{second.entry}")
    assert (entry.json["content_type"], entry.json["bytes"], entry.json["answer"]) == ("audio/mpeg", len(SPEECH), None)


@pytest.mark.parametrize("fields", [{}, {"seed": 7}], ids=["sampled", "seeded"])
async def test_images_are_stored_if_the_request_has_a_seed(stage: Stage, fields: dict[str, Any]) -> None:
    """Images without a seed are relayed each time, images with one are computed once."""
    raw = await stage.raw(saying(json_reply(b'{"created": 1, "data": [{"b64_json": "eA=="}]}')))
    client = await stage.gateway(raw)
    asked = {"model": "mock", "prompt": "a cat", **fields}
    answers = [await ask(client, "/v1/images/generations", asked) for _ in range(2)]

    assert [answer.cache for answer in answers] == (["miss", "hit"] if fields else ["bypass"] * 2)


@pytest.mark.parametrize(
    "reply",
    [
        json_reply(b'{"error": {"message": "no"}}'),
        json_reply(b'{"error": {"message": "no"}}', status=b"429 Too Many Requests"),
        json_reply(b'{"results": []}'),
    ],
)
async def test_what_is_no_answer_is_not_stored(stage: Stage, reply: bytes) -> None:
    """An error or an empty answer is relayed with its status and asked for again."""
    raw: RawUpstream = await stage.raw(saying(reply))
    client = await stage.gateway(raw)
    answers = [await ask(client, "/v1/moderations", {"model": "mock", "input": "x"}) for _ in range(2)]

    assert [answer.cache for answer in answers] == ["miss"] * 2
    assert len(raw.connections) == 2
    assert {str(answer.status).encode() for answer in answers} == {reply[9:12]}


@pytest.mark.parametrize("body", [b"", b"<html>"])
async def test_what_cannot_be_an_answer_is_an_error(stage: Stage, body: bytes) -> None:
    """A status of 200 with something else than JSON becomes a clear error, and is asked for again."""
    raw: RawUpstream = await stage.raw(saying(json_reply(body)))
    client = await stage.gateway(raw)
    answers = [await ask(client, "/v1/moderations", {"model": "mock", "input": "x"}) for _ in range(2)]

    assert {(answer.status, answer.error["code"]) for answer in answers} == {(502, "upstream_cut")}
    assert len(raw.connections) == 2


async def test_equal_requests_in_flight_share_one_call(stage: Stage) -> None:
    """Five equal moderations at once are one upstream call."""
    mock: MockUpstream = await stage.mock(Reply(body={"results": [{"flagged": True}]}))
    client = await stage.gateway(mock)
    mock.hold.clear()
    asking = [asyncio.create_task(ask(client, "/v1/moderations", {"model": "mock", "input": "x"})) for _ in range(5)]
    await mock.wait_for(1)
    await client.until("flights", 1)
    mock.hold.set()
    answers = await asyncio.gather(*asking)

    assert {answer.body for answer in answers} == {b'{"results":[{"flagged":true}]}'}
    assert len(mock.received) == 1
