"""A request whose answer is a function of it is told from others, and its answer from what must not be stored."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from aiohttp import FormData, web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from openai.types import ImagesResponse, ModerationCreateResponse
from openai.types.audio import Transcription, TranscriptionDiarized, TranscriptionVerbose

from cache.entries.key import Key, request_key
from gateway.errors import InvalidRequest
from gateway.surfaces.whole import ENDPOINTS, WholeRequest, whole_request

Json = dict[str, Any]

JSON = "application/json"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
IMAGES = "/v1/images/generations"
PATHS = [path for endpoint in ENDPOINTS for path in endpoint.paths]
FORM_PATHS = [path for endpoint in ENDPOINTS if endpoint.takes_forms for path in endpoint.paths]


def asked(path: str, fields: Json) -> WholeRequest | None:
    return whole_request(path, JSON, json.dumps(fields).encode())


def form(fields: Mapping[str, str], file: bytes = b"RIFF", filename: str = "a.wav") -> tuple[str, bytes]:
    """The Content-Type and the body of a form with a file, under a boundary of its own."""

    async def encoded() -> tuple[str, bytes]:
        data = FormData(default_to_multipart=True)
        for name, value in fields.items():
            data.add_field(name, value)
        data.add_field("file", file, filename=filename, content_type="audio/wav")
        payload = data()
        return payload.headers["Content-Type"], await payload.as_bytes()

    return asyncio.run(encoded())


def with_form(
    path: str, fields: Mapping[str, str], file: bytes = b"RIFF", filename: str = "a.wav"
) -> WholeRequest | None:
    return whole_request(path, *form(fields, file, filename))


def known(request: WholeRequest | None) -> WholeRequest:
    assert request is not None
    return request


def key(request: WholeRequest | None) -> Key:
    return request_key("public", "a path", known(request).fields)


@pytest.mark.parametrize("path", PATHS)
def test_a_request_with_a_model_is_whole(path: str) -> None:
    """A request in JSON with a model, and a seed, has its fields, model and family on every path."""
    fields = {"model": "m", "input": "x", "seed": 0}
    request = known(asked(path, fields))
    assert (request.fields, request.model, request.sampled) == (fields, "m", False)
    assert path in request.endpoint.paths
    assert path in request.endpoint.paths


@pytest.mark.parametrize("path", FORM_PATHS)
def test_a_form_with_a_model_is_whole(path: str) -> None:
    """A form with a model, and a seed, is read on each path that takes files."""
    request = known(with_form(path, {"model": "m", "seed": "1"}))
    assert (request.model, request.sampled) == ("m", False)
    assert key(request) != key(asked(path, {"model": "m", "seed": "1", "file": "RIFF"}))


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_the_openai_clients_requests_are_whole() -> None:
    """What OpenAI's client sends to each of its endpoints is read, and equal calls have equal keys."""
    requests: list[WholeRequest] = []

    async def answer(request: web.Request) -> web.Response:
        content_type = request.headers["Content-Type"]
        requests.append(known(whole_request(request.path, content_type, await request.read())))
        return web.json_response({"text": "", "results": [], "data": []})

    application = web.Application()
    application.router.add_post("/v1/{rest:.+}", answer)
    async with TestServer(application) as server:
        client = AsyncOpenAI(base_url=str(server.make_url("/v1")), api_key="any")
        file, seed = ("a.png", b"PNG"), {"seed": 1}
        for _ in range(2):
            await client.moderations.create(model="m", input=["a", "b"])
            await client.audio.transcriptions.create(model="m", file=("a.wav", b"RIFF"), include=["logprobs"])
            await client.audio.translations.create(model="m", file=("a.wav", b"RIFF"), temperature=0)
            await client.audio.speech.create(model="m", input="a", voice="alloy")
            await client.images.generate(model="m", prompt="a", extra_body=seed)
            await client.images.edit(model="m", prompt="a", image=[file, file], extra_body=seed)
            await client.images.create_variation(model="m", image=file, extra_body=seed)

    keys = [key(request) for request in requests]
    assert keys[:7] == keys[7:]
    assert len(set(keys)) == 7
    assert [request.endpoint.family for request in requests[:7]] == [
        "moderations", "audio.transcriptions", "audio.translations", "audio.speech", "images", "images", "images"
    ]  # fmt: skip
    assert not any(request.sampled for request in requests)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/moderations", {"input": "x", "model": ["m"]}),
        ("/v1/chat/completions", {"model": "m"}),
        ("/v1/rerank/", {"model": "m"}),
        ("/v1/audio/speech", {"model": "m", "stream_format": "sse"}),
        ("/v1/audio/speech", {"model": "m", "stream": True}),
        ("/v1/audio/speech", {"model": "m", "stream": {}}),
        (IMAGES, {"model": "m", "prompt": "x"}),
        (IMAGES, {"model": "m", "prompt": "x", "seed": None}),
        (IMAGES, {"model": "m", "prompt": "x", "seed": 1, "stream": True}),
    ],
    ids=str,
)
def test_other_requests_are_passed_on(path: str, fields: Json) -> None:
    """A request with a strange model, for a stream, for images without a seed, or to another path is not whole."""
    assert asked(path, fields) is None


@pytest.mark.parametrize("fields", [{"model": "m", "stream": "true"}, {"model": "m", "stream": "1"}], ids=str)
def test_other_forms_are_passed_on(fields: dict[str, str]) -> None:
    """A form for a stream is not whole, nor is one for images without a seed."""
    assert with_form(TRANSCRIPTIONS, fields) is None
    assert with_form("/v1/images/edits", {"model": "m"}) is None
    assert with_form("/v1/images/edits", {"model": "m", "seed": ""}) is None


@pytest.mark.parametrize("content_type", ["", "text/plain", "audio/wav", "multipart/form-data; boundary=B"])
def test_another_content_type_is_passed_on(content_type: str) -> None:
    """A body of another content type than the endpoint's is not read."""
    assert whole_request("/v1/moderations", content_type, b"\xff") is None


@pytest.mark.parametrize("content_type", [JSON, "Application/JSON; charset=utf-8", "application/x+json"])
def test_a_body_that_is_no_object_is_refused(content_type: str) -> None:
    """A body of JSON's content type that is not one object is refused, and so is a form that is none."""
    for body in (b"", b"[]", b"{", b"\xff", b'{"model":"a","model":"b"}', b"[" * 10**5):
        with pytest.raises(InvalidRequest):
            whole_request("/v1/moderations", content_type, body)
    with pytest.raises(InvalidRequest):
        whole_request(TRANSCRIPTIONS, "multipart/form-data; boundary=B", b"{}")


def test_a_field_that_a_form_says_twice_is_refused() -> None:
    """A form with two models is refused by name."""
    content_type, body = form({"model": "m", "Model": "n"})
    with pytest.raises(InvalidRequest, match="'model' is there twice"):
        whole_request(TRANSCRIPTIONS, content_type, body.replace(b'"Model"', b'"model"'))


def test_what_a_form_says_counts() -> None:
    """Every field, file and name of a form changes the key; its boundary and `stream: false` do not."""
    plain = {"model": "m", "language": "en"}
    keys = [
        key(with_form(TRANSCRIPTIONS, plain)),
        key(with_form(TRANSCRIPTIONS, {"model": "m"})),
        key(with_form(TRANSCRIPTIONS, {**plain, "language": "de"})),
        key(with_form(TRANSCRIPTIONS, {**plain, "temperature": "0"})),
        key(with_form(TRANSCRIPTIONS, plain, b"RIFX")),
        key(with_form(TRANSCRIPTIONS, plain, filename="a.mp3")),
        key(with_form(TRANSCRIPTIONS, plain, filename="\xe9.mp3")),
    ]
    assert len(set(keys)) == len(keys)
    assert (
        key(with_form(TRANSCRIPTIONS, plain)) == key(with_form(TRANSCRIPTIONS, {**plain, "stream": "false"})) == keys[0]
    )


def test_a_name_of_a_file_in_another_charset_has_a_key() -> None:
    """The key is made of the bytes of a file's name, whether they are UTF-8 or not."""
    content_type, body = form({"model": "m"})
    names = (b"a.wav", b"\xe9.wav", b"\xe8.wav", "é.wav".encode())
    keys = {key(whole_request(TRANSCRIPTIONS, content_type, body.replace(b"a.wav", name))) for name in names}
    assert len(keys) == 4


def test_no_text_has_the_digest_of_a_file() -> None:
    """A field that has the digest of a file as its text, in a form or in JSON, gives another key than the file."""
    request = known(with_form(TRANSCRIPTIONS, {"model": "m", "prompt": "x"}))
    prompt, digest = request.fields["form"][1], request.fields["form"][1][-1]
    content_type, body = form({"model": "m", "prompt": "x"})
    forged = whole_request(TRANSCRIPTIONS, content_type, body.replace(b"\r\n\r\nx\r\n", b"\r\n\r\n%s\r\n" % digest))
    assert key(forged) != key(request)
    as_text = [[str(value, "latin-1") if isinstance(value, bytes) else value for value in prompt]]
    assert key(asked(TRANSCRIPTIONS, {"model": "m", "form": as_text})) != key(request)


@pytest.mark.parametrize(
    ("fields", "sampled"),
    [
        ({}, False),
        ({"temperature": "0"}, False),
        ({"temperature": "0.0"}, False),
        ({"temperature": ""}, False),
        ({"temperature": "0.2"}, True),
        ({"temperature": "nan"}, True),
        ({"temperature": "warm"}, True),
        ({"temperature": "0.2", "seed": "1"}, False),
        ({"temperature": "0.2", "seed": ""}, True),
    ],
    ids=str,
)
def test_a_transcription_with_a_temperature_is_sampled(fields: dict[str, str], sampled: bool) -> None:
    """A transcription is sampled if it has a temperature above 0 and no seed."""
    assert known(with_form(TRANSCRIPTIONS, {"model": "m", **fields})).sampled is sampled


@pytest.mark.parametrize(
    ("temperature", "sampled"),
    [(None, False), (0, False), (0.0, False), (1, True), (10**400, True), ([], True), ({}, True)],
)
def test_speech_with_a_temperature_is_sampled(temperature: Any, sampled: bool) -> None:
    """A temperature counts in JSON as it does in a form, whatever its type."""
    request = known(asked("/v1/audio/speech", {"model": "m", "input": "x", "temperature": temperature}))
    assert request.sampled is sampled


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(
    st.sampled_from(PATHS),
    st.dictionaries(st.sampled_from(["model", "stream", "seed", "temperature", "stream_format", "input"]), values),
)
@settings(max_examples=200, deadline=None)
def test_any_fields_are_whole_or_passed_on(path: str, fields: Json) -> None:
    """Fields of any type give a request with a key, or none."""
    request = asked(path, fields)
    if request is not None:
        assert request.model == (fields.get("model") or "")
        assert key(request)
        assert not fields.get("stream") or fields["stream"] in ("false", "False", "0")


@given(
    st.sampled_from(ENDPOINTS),
    st.sampled_from([JSON, "text/plain", "audio/mpeg", ""]),
    st.binary() | values.map(json.dumps),
)
@settings(max_examples=200, deadline=None)
def test_any_answer_is_judged(endpoint: Any, content_type: str, body: bytes | str) -> None:
    """An answer of any bytes is storable or not, and never an exception."""
    fault = endpoint.storable(200, content_type, body.encode("utf-8", "replace") if isinstance(body, str) else body)
    assert fault is None or fault


SCORES = dict.fromkeys(
    [
        "harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm",
        "self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic",
    ],
    0.5,
)  # fmt: skip
MODERATION = {
    "categories": dict.fromkeys(SCORES, False),
    "category_scores": SCORES,
    "category_applied_input_types": {name: ["text"] for name in SCORES},
    "flagged": False,
}
# An answer of each endpoint in the form of OpenAI's client, or of the servers that have the endpoint.
ANSWERS: list[tuple[str, Json | list[Json], Any]] = [
    ("/v1/moderations", {"id": "a", "model": "m", "results": [MODERATION]}, ModerationCreateResponse),
    ("/v1/rerank", {"results": [{"index": 0, "relevance_score": 0.9, "document": {"text": "x"}}]}, None),
    ("/v2/rerank", {"id": "a", "results": [{"index": 0, "relevance_score": 0.9}], "meta": {}}, None),
    ("/rerank", [{"index": 1, "score": 0.9}], None),
    ("/v1/score", {"object": "list", "data": [{"index": 0, "object": "score", "score": 0.9}], "error": None}, None),
    (TRANSCRIPTIONS, {"text": "hello"}, Transcription),
    (TRANSCRIPTIONS, {"text": ""}, Transcription),
    (TRANSCRIPTIONS, {"text": "a", "duration": 1.0, "language": "en"}, TranscriptionVerbose),
    (TRANSCRIPTIONS, {"text": "a", "duration": 1.0, "segments": [], "task": "transcribe"}, TranscriptionDiarized),
    (IMAGES, {"created": 1, "data": [{"b64_json": "iVBO"}]}, ImagesResponse),
]


@pytest.mark.parametrize(("path", "answer", "shape"), ANSWERS, ids=str)
def test_a_whole_answer_is_storable(path: str, answer: Json | list[Json], shape: Any) -> None:
    """An answer as the endpoint gives it may be stored, with status 200 alone, and not as a stream or an error."""
    request = known(asked(path, {"model": "m", "seed": 1}))
    if shape is not None:
        assert shape.model_validate(answer).model_extra in (None, {})
    body = json.dumps(answer, indent=1).encode()
    for content_type in (JSON, "Application/JSON; charset=utf-8"):
        assert request.endpoint.storable(200, content_type, body) is None
    for status in (201, 204, 206, 400, 500):
        assert request.endpoint.storable(status, JSON, body) == "not status 200"
    for content_type in ("text/event-stream; charset=utf-8", "application/x-ndjson"):
        assert request.endpoint.storable(200, content_type, body) == "a stream"
    assert request.endpoint.storable(200, "text/html", body)
    assert request.endpoint.storable(200, JSON, body[:-1])
    if isinstance(answer, dict):
        assert (
            request.endpoint.storable(200, JSON, json.dumps(answer | {"error": {"message": "no"}}).encode())
            == "an error"
        )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("content_type", [JSON, "text/plain", "audio/mpeg"])
def test_an_empty_answer_is_not_stored(path: str, content_type: str) -> None:
    """An answer of no bytes, or of white space alone, is not stored."""
    request = known(asked(path, {"model": "m", "seed": 1}))
    assert (
        request.endpoint.storable(200, content_type, b"")
        == request.endpoint.storable(200, content_type, b" \r\n")
        == "empty"
    )


@pytest.mark.parametrize(
    ("path", "content_type", "body", "fault"),
    [
        ("/v1/moderations", JSON, b'{"results":[]}', "no results"),
        ("/v1/moderations", JSON, b'{"results":{"a":1}}', "no results"),
        ("/v1/moderations", JSON, b"[]", "no results"),
        ("/v1/moderations", JSON, b'"text"', "not JSON"),
        ("/v1/moderations", JSON, b"[" * 10**5, "not JSON"),
        ("/v1/moderations", JSON, b'{"results":[\xff]}', "not JSON"),
        ("/v1/rerank", JSON, b'{"results":[{"index":0,"relevance_score":NaN}]}', "not JSON"),
        ("/v1/rerank", "text/plain", b'{"results":[{"index":0}]}', "not JSON"),
        (TRANSCRIPTIONS, "text/plain; charset=utf-8", b"hello\n", None),
        (TRANSCRIPTIONS, "text/vtt", b"WEBVTT\n", None),
        (TRANSCRIPTIONS, "application/x-subrip", b"1\n", None),
        (TRANSCRIPTIONS, "text/plain", b"{braces} and what follows", None),
        (TRANSCRIPTIONS, "text/plain", b' {"error": "model is loading"}', "an error"),
        (TRANSCRIPTIONS, "text/html", b"<html>", "no text"),
        (TRANSCRIPTIONS, "application/octet-stream", b"hello", "no text"),
        (TRANSCRIPTIONS, "", b"hello", "no text"),
        (TRANSCRIPTIONS, JSON, b'{"text":null}', "no text"),
        (TRANSCRIPTIONS, JSON, b"hello", "no text"),
        ("/v1/audio/speech", "audio/mpeg", b"\xff\xfb", None),
        ("/v1/audio/speech", "application/octet-stream", b"\xff\xfb", None),
        ("/v1/audio/speech", JSON, b'{"error":"x"}', "no audio"),
        ("/v1/audio/speech", "text/html", b"<html>", "no audio"),
        (IMAGES, JSON, b'{"data":[{"url":"https://a.example/1.png"}]}', "links to images"),
        (IMAGES, JSON, b'{"data":[{"b64_json":"aa"},{"url":"https://a.example/1.png"}]}', "links to images"),
        (IMAGES, JSON, b'{"data":[{"b64_json":""}]}', "no images"),
        (IMAGES, JSON, b'{"data":[{"b64_json":"aa"},{}]}', "no images"),
        (IMAGES, JSON, b'{"data":[1]}', "no images"),
        (IMAGES, JSON, b'{"data":[]}', "no images"),
        (IMAGES, JSON, b"[]", "no images"),
        (IMAGES, "image/png", b"\x89PNG", "not JSON"),
    ],
    ids=str,
)
def test_what_an_endpoint_does_not_answer_is_not_stored(
    path: str, content_type: str, body: bytes, fault: str | None
) -> None:
    """An answer is stored only if it has what the endpoint answers with."""
    assert known(asked(path, {"model": "m", "seed": 1})).endpoint.storable(200, content_type, body) == fault
