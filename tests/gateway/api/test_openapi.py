"""The document at GET /openapi.json: it is valid, it is complete, and the server answers what it says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from aiohttp import web
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from backend import protocol
from gateway.api import page
from gateway.api.openapi.document import document, routes
from gateway.api.openapi.operation import JSON
from gateway.api.openapi.operations import IN_WORDS, OPERATIONS
from gateway.processes.routes import build_application
from gateway.settings.settings import BatchSettings, Settings
from gateway.tenants.callers import Callers
from gateway.upstreams.mock import MockUpstream, Reply
from tests.cache.valkey import Valkey
from tests.gateway.client import CHAT, COMPLETIONS, Answer, Client, chat
from tests.gateway.conftest import LIMIT, Stage

Json = dict[str, Any]
MESSAGES = [{"role": "user", "content": "hello"}]
BODIES: dict[str, Json] = {
    CHAT: {"messages": MESSAGES},
    COMPLETIONS: {"prompt": "hello"},
    "/v1/embeddings": {"input": ["hello", "world"]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/generate": {"prompt": "hello"},
    "/api/chat": {"messages": MESSAGES, "stream": False},
    "/api/generate": {"prompt": "hello", "stream": False},
    "/api/embed": {"input": "hello"},
    "/api/embeddings": {"prompt": "hello"},
}
"""A request of each surface that an upstream answers."""
STREAMED = [path for path in BODIES if "embed" not in path]
surfaces = pytest.mark.parametrize("path", BODIES)


@pytest.fixture
def application(tmp_path: Path) -> web.Application:
    return unopened(Settings(state_dir=str(tmp_path)))


def unopened(settings: Settings) -> web.Application:
    """An application of which only the routes are used."""
    return build_application(settings, Callers(None, settings), {})


class Documented:
    """The document of a running gateway."""

    def __init__(self, document: Json) -> None:
        self._document = document

    @classmethod
    async def of(cls, client: Client) -> "Documented":
        return cls((await client.get("/openapi.json")).json)

    def check(self, method: str, path: str, answer: Answer) -> None:
        """Assert that an answer has a documented status, content type, headers and body."""
        responses = self._document["paths"][path][method.lower()]["responses"]
        said = self._resolved(responses.get(str(answer.status)) or responses["default"])
        kind = answer.headers["Content-Type"].partition(";")[0]
        assert kind in said["content"], (kind, answer.status)
        for name, header in said.get("headers", {}).items():
            header = self._resolved(header)
            assert name in answer.headers or not header.get("required"), name
            if header["schema"].get("enum") and name in answer.headers:
                assert answer.headers[name] in header["schema"]["enum"]
        if kind == "application/json":
            self.check_body(said["content"][kind]["schema"], answer.json)

    def check_body(self, schema: Json, body: Any) -> None:
        whole = {**schema, "components": self._document["components"]}
        faults = [str(error) for error in jsonschema_rs.Draft202012Validator(whole).iter_errors(body)]
        assert not faults, faults

    def _resolved(self, described: Json) -> Json:
        while "$ref" in described:
            place = self._document
            for part in described["$ref"].removeprefix("#/").split("/"):
                place = place[part]
            described = place
        return described


def schemas_in(value: Any) -> Iterator[Json]:
    """Every schema of a document, outside of other schemas."""
    if isinstance(value, list):
        for item in value:
            yield from schemas_in(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            if name == "schema":
                yield item
            elif name == "schemas":
                yield from item.values()
            else:
                yield from schemas_in(item)


def references_in(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from references_in(item)
    elif isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references_in(item)


# The document itself


async def test_the_document_is_openapi_3_1(stage: Stage) -> None:
    """The document follows the specification, each schema in it follows JSON Schema, and each reference leads there."""
    answer = await (await stage.gateway(await stage.mock())).get("/openapi.json")

    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    assert [str(error) for error in OPENAPI_31_VALIDATOR.iter_errors(answer.json)] == []
    for schema in schemas_in(answer.json):
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    ids = [operation["operationId"] for path in answer.json["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids))
    for reference in references_in(answer.json):
        place = answer.json
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_the_document_has_every_route_and_no_other(application: web.Application) -> None:
    """Each route is an operation or, if it is for every method, described in words; and nothing else is described."""
    described = document(application)

    operations = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    registered = {
        (route.method, route.resource.canonical) for route in application.router.routes() if route.resource is not None
    }
    relays = {path for method, path in registered if method == "*"}
    assert operations == {(method, path) for method, path in registered if method not in ("*", "HEAD")}
    assert operations == set(OPERATIONS)
    assert relays == set(IN_WORDS)
    assert all(text in described["info"]["description"] for text in IN_WORDS.values())


def test_the_reference_names_every_route(application: web.Application) -> None:
    """The page for readers has each path of the document."""
    reference = (Path(__file__).parents[3] / "docs/reference/api.md").read_text()

    paths = {path.replace("{operation}", name) for _, path in OPERATIONS for name in ("lookup", "pin", "unpin")}
    assert [path for path in sorted(paths) if f" {path}`" not in reference] == []


def test_a_route_without_a_description_is_an_error(application: web.Application) -> None:
    """A route that somebody adds has to be described."""
    application.router.add_get("/v1/new", page.show)

    with pytest.raises(KeyError, match="/v1/new"):
        document(application)


def test_routes_that_are_switched_off_are_not_described(tmp_path: Path) -> None:
    """Without batches the document has no files."""
    application = unopened(Settings(state_dir=str(tmp_path), batches=BatchSettings(enabled=False)))

    assert not [path for _, path in routes(application) if path.startswith(("/v1/files", "/v1/batches"))]
    assert "/v1/batches" not in document(application)["paths"]
    assert OPENAPI_31_VALIDATOR.is_valid(document(application))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ChatCompletionRequest", protocol.ChatRequest),
        ("ChatMessage", protocol.Message),
        ("CompletionRequest", protocol.CompletionRequest),
        ("EmbeddingsRequest", protocol.EmbeddingRequest),
        ("PromptOfStore", protocol.TokenizeRequest),
    ],
)
def test_the_fields_that_the_engine_reads_are_described(
    application: web.Application, name: str, kind: type[msgspec.Struct]
) -> None:
    """Each field of a request that the in-repo engine declares is in the schema of that request."""
    properties = document(application)["components"]["schemas"][name]["properties"]

    assert set(kind.__struct_fields__) - set(properties) == set()


# What the server answers


@surfaces
async def test_an_answer_is_as_documented(stage: Stage, path: str) -> None:
    """A miss and a hit of each surface validate against the schema of its answer."""
    client = await stage.gateway(await stage.mock())
    documented = await Documented.of(client)

    for outcome in ("miss", "hit"):
        answer = await client.post({"model": "mock", **BODIES[path]}, path)
        assert (answer.status, answer.cache) == (200, outcome)
        documented.check("POST", path, answer)


@pytest.mark.parametrize("path", STREAMED)
async def test_a_stream_is_as_documented(stage: Stage, path: str) -> None:
    """A stream of each surface has a documented content type and headers, computed and from the cache."""
    client = await stage.gateway(await stage.mock())
    documented = await Documented.of(client)

    for outcome in ("miss", "hit"):
        answer = await client.post({"model": "mock", **BODIES[path], "stream": True}, path)
        assert (answer.status, answer.cache) == (200, outcome)
        assert not answer.headers["Content-Type"].startswith("application/json")
        documented.check("POST", path, answer)


async def test_a_tool_call_is_as_documented(stage: Stage) -> None:
    """A message without content, with reasoning and a tool call, validates in each form of API."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    message = {"content": None, "reasoning_content": "I should look.", "tool_calls": [call]}
    client = await stage.gateway(await stage.mock(Reply(message=message, finish_reason="tool_calls")))
    documented = await Documented.of(client)

    for path in STREAMED:
        if path != COMPLETIONS:
            documented.check("POST", path, await client.post({"model": "mock", **BODIES[path]}, path))


async def test_an_answer_without_a_prompt_is_as_documented(stage: Stage) -> None:
    """What only loads a model, describes one or says that it is there validates."""
    client = await stage.gateway(await stage.mock())
    documented = await Documented.of(client)

    for path in ("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/pull"):
        answer = await client.post({"model": "mock"}, path)
        assert answer.status == 200
        documented.check("POST", path, answer)
    batch = await client.post({"model": "mock", "prompts": ["a", "b"]}, "/v1/generate/batch")
    assert batch.status == 200
    documented.check("POST", "/v1/generate/batch", batch)


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/api/tags", "/api/ps", "/api/version", "/v1/cache/stats", "/v1/cache/prefix"),
        *("/v1/files", "/v1/batches", "/", "/health", "/ready", "/metrics", "/openapi.json"),
    ],
)
async def test_what_is_listed_is_as_documented(stage: Stage, path: str) -> None:
    """Lists, figures and pages have the documented form."""
    client = await stage.gateway(await stage.mock())
    await client.post(chat("hello"))
    documented = await Documented.of(client)

    answer = await client.get(path)

    assert answer.status == 200
    documented.check("GET", path, answer)


async def test_models_in_anthropics_form_are_as_documented(stage: Stage) -> None:
    """The list that Anthropic's clients get validates too."""
    client = await stage.gateway(await stage.mock())

    answer = await client.get("/v1/models", anthropic_version="2023-06-01")

    assert answer.json["data"][0]["type"] == "model"
    (await Documented.of(client)).check("GET", "/v1/models", answer)
    model = await client.get("/v1/models/mock", anthropic_version="2023-06-01")
    assert model.json == answer.json["data"][0]
    (await Documented.of(client)).check("GET", "/v1/models/{model}", model)
    absent = await client.get("/v1/models/absent", anthropic_version="2023-06-01")
    assert (absent.status, absent.json["error"]["message"]) == (404, "The model 'absent' does not exist.")


async def test_an_entry_is_as_documented(stage: Stage) -> None:
    """An entry, its deletion, and a purge of each kind have the documented form."""
    client = await stage.gateway(await stage.mock())
    documented = await Documented.of(client)
    entry = (await client.post(chat("hello"))).entry

    for method in ("GET", "DELETE"):
        answer = await client.send(method, f"/v1/cache/entries/{entry}")
        assert answer.status == 200
        documented.check(method, "/v1/cache/entries/{id}", answer)
    for query in ("", "?model=mock", "?namespace=public"):
        documented.check("DELETE", "/v1/cache", await client.send("DELETE", "/v1/cache" + query))


async def test_a_kept_response_is_as_documented(stage: Stage) -> None:
    """A response, its input and its deletion have the documented form."""
    client = await stage.gateway(await stage.mock(), redis="none")
    documented = await Documented.of(client)
    made = await client.post({"model": "mock", "input": "hello"}, "/v1/responses")

    for method, path in (
        ("GET", "/v1/responses/{id}"),
        ("GET", "/v1/responses/{id}/input_items"),
        ("DELETE", "/v1/responses/{id}"),
    ):
        answer = await client.send(method, path.replace("{id}", made.json["id"]))
        assert answer.status == 200
        documented.check(method, path, answer)


async def test_files_and_batches_are_as_documented(stage: Stage) -> None:
    """A file and a batch have the documented form from their creation to their end."""
    client = await stage.gateway(await stage.mock())
    documented = await Documented.of(client)
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": chat("hello")}
    part = "--x\r\nContent-Disposition: form-data; name="
    content = msgspec.json.encode(line).decode()
    form = f'{part}"purpose"\r\n\r\nbatch\r\n{part}"file"\r\n\r\n{content}\r\n--x--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    created = await client.send("POST", "/v1/files", form.encode(), headers)
    assert created.status == 200
    documented.check("POST", "/v1/files", created)
    asked = {"input_file_id": created.json["id"], "endpoint": CHAT, "completion_window": "24h"}
    batch = await client.post(asked, "/v1/batches")
    assert batch.status == 200
    documented.check("POST", "/v1/batches", batch)

    for method, path, given in (
        ("GET", "/v1/batches/{id}", batch),
        ("GET", "/v1/batches", batch),
        ("GET", "/v1/files", created),
        ("GET", "/v1/files/{id}", created),
        ("GET", "/v1/files/{id}/content", created),
        ("DELETE", "/v1/files/{id}", created),
    ):
        answer = await client.send(method, path.replace("{id}", given.json["id"]))
        assert answer.status == 200, path
        documented.check(method, path, answer)
    documented.check(
        "POST", "/v1/batches/{id}/cancel", await client.post(b"", f"/v1/batches/{batch.json['id']}/cancel")
    )


# Errors


@surfaces
@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (413, b'{"model": "' + b"x" * LIMIT + b'"}', {}),
        (504, {"model": "mock"}, {"cache_control": "only-if-cached"}),
    ],
)
async def test_an_error_is_as_documented(
    served: tuple[Client, MockUpstream], path: str, status: int, body: Any, headers: dict[str, str]
) -> None:
    """Each surface answers a fault of the request with the documented status, in its own form of errors."""
    client, _ = served
    documented = await Documented.of(client)

    answer = await client.post({**body, **BODIES[path]} if isinstance(body, dict) else body, path, **headers)

    assert answer.status == status
    documented.check("POST", path, answer)


@pytest.mark.parametrize(
    "path", [path for (method, path), described in OPERATIONS.items() if method == "POST" and JSON in described.body]
)
async def test_a_body_that_is_no_json_object_is_refused_as_documented(stage: Stage, valkey: Valkey, path: str) -> None:
    """Each endpoint that takes JSON refuses what is no JSON object with 400, in its own form of errors."""
    client = await stage.gateway(await stage.mock(), redis=valkey.url)
    documented = await Documented.of(client)

    for body in (b"", b'{"model": ', b"[]", b'{"model": "\\ud800"}', b'{"model": 1, "model": 1}', b"\xff"):
        if path.endswith("/rotate") and not body:
            continue  # it may be left out
        answer = await client.post(body, re.sub(r"{\w+}", "x", path.replace("{operation}", "pin")))
        assert answer.status == 400
        documented.check("POST", path, answer)


@surfaces
@pytest.mark.parametrize(("upstream", "status"), [("http://127.0.0.1:9/v1", 502), ("", 503)])
async def test_an_upstream_that_is_not_there_is_told_as_documented(
    stage: Stage, path: str, upstream: str, status: int
) -> None:
    """Each surface says in its own form of errors that no upstream answers."""
    client = await stage.gateway(*([upstream] if upstream else []))
    documented = await Documented.of(client)

    answer = await client.post({"model": "mock", **BODIES[path]}, path)

    assert answer.status == status
    documented.check("POST", path, answer)


@surfaces
async def test_an_error_of_an_upstream_is_told_as_documented(stage: Stage, path: str) -> None:
    """Each surface tells an upstream's own refusal in its own form of errors, with the status."""
    error = {"message": "Slow down.", "type": "rate_limit_error", "param": None, "code": None}
    client = await stage.gateway(await stage.mock(Reply(status=429, error=error)))
    documented = await Documented.of(client)

    answer = await client.post({"model": "mock", **BODIES[path]}, path)

    assert answer.status == 429
    assert "Slow down." in answer.body.decode()
    documented.check("POST", path, answer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/cache/entries/{id}", 404),
        ("DELETE", "/v1/cache/entries/{id}", 404),
        ("DELETE", "/v1/cache", 400),
        ("GET", "/v1/cache/prefix", 400),
        ("GET", "/v1/responses/{id}", 404),
        ("DELETE", "/v1/responses/{id}", 404),
        ("GET", "/v1/files", 400),
        ("GET", "/v1/files/{id}", 404),
        ("DELETE", "/v1/files/{id}", 404),
        ("GET", "/v1/files/{id}/content", 404),
        ("POST", "/v1/files", 400),
        ("GET", "/v1/batches", 400),
        ("GET", "/v1/batches/{id}", 404),
        ("POST", "/v1/batches", 400),
        ("POST", "/v1/batches/{id}/cancel", 404),
        ("POST", "/v1/generate/batch", 400),
        ("POST", "/v1/messages/count_tokens", 400),
        ("POST", "/v1/cache/prefix/{operation}", 404),
        ("DELETE", "/v1/cache/prefix", 404),
        ("POST", "/api/show", 404),
        ("POST", "/api/pull", 404),
    ],
)
async def test_a_refusal_is_as_documented(stage: Stage, method: str, path: str, status: int) -> None:
    """What is not there, and a parameter that does not exist, are told with the documented status and form."""
    client = await stage.gateway(await stage.mock())
    documented = await Documented.of(client)
    query = "?surplus=1" if status == 400 and method != "POST" else ""
    body = {"model": "no-such" if path.startswith("/api") else "mock"} if method == "POST" else None
    if path.endswith("cancel"):
        body = None

    target = path.replace("{id}", "public.none").replace("{operation}", "pin")
    answer = await client.send(method, target + query, body)

    assert answer.status == status
    assert str(status) in documented_statuses(await client.get("/openapi.json"), method, path)
    documented.check(method, path, answer)


def documented_statuses(answer: Answer, method: str, path: str) -> list[str]:
    return list(answer.json["paths"][path][method.lower()]["responses"])


@pytest.mark.parametrize(("method", "path"), [key for key, described in OPERATIONS.items() if described.operator])
@pytest.mark.parametrize(
    ("status", "settings"),
    [(401, {"admin_key": "the-key"}), (403, {"host": "0.0.0.0"})],  # noqa: S104  # for access from other hosts
)
async def test_who_is_no_operator_is_told_as_documented(
    stage: Stage, method: str, path: str, status: int, settings: Json
) -> None:
    """An operator's route refuses others with the documented status and form."""
    client = await stage.gateway(await stage.mock(), **settings)

    answer = await client.send(
        method, re.sub(r"{\w+}", "x", path.replace("{operation}", "pin")), {} if method == "POST" else None
    )

    assert answer.status == status
    (await Documented.of(client)).check(method, path, answer)
