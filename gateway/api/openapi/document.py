"""The OpenAPI document of an application, made of its table of routes."""

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.openapi.keepgate_schemas import AnthropicError, OllamaError, OpenAIError
from gateway.api.openapi.operation import JSON, TEXT, Json, Operation, Schema
from gateway.api.openapi.operations import IN_WORDS, OPERATIONS
from gateway.surfaces.registry import form_of

_REF = "#/components/schemas/{name}"
_ERROR_FORMS = {"messages": AnthropicError, "ollama.chat": OllamaError}
_REASONS = {
    400: "An invalid body, header or parameter. Of OpenAI's form, `param` names it.",
    401: "Without a virtual key or the admin key: `key_required`, `invalid_api_key` or `admin_key_required`.",
    403: "`model_not_allowed`, `endpoint_not_allowed` or `foreign_origin`; or no admin key is set, and the gateway does"
    " not listen on the loopback alone: `admin_key_required`.",
    404: "`not_found`, `previous_response_not_found` or `no_prefix_store`; or the upstream does not have it.",
    408: "The client sent its body too slowly: `request_timeout`.",
    413: "The body is too long: `body_too_large`.",
    421: "The Host header names another host: `wrong_host`.",
    429: "A limit is reached, as `Retry-After` says: `rate_limit_exceeded`, `insufficient_quota`,"
    " `upstream_busy` or `too_busy`.",
    500: "A fault of the gateway: `internal_error`. Its log says where.",
    502: "No connection to an upstream, or it broke: `upstream_unreachable` or `upstream_cut`.",
    503: "No upstream is ready, the shared store does not answer, or the gateway stops: `no_upstream`,"
    " `store_unavailable` or `shutting_down`.",
    504: "The upstream was too slow, or `only-if-cached` and no entry: `upstream_timeout` or `not_cached`.",
    507: "The gateway's disk is full: `storage_full`.",
}
# Of a head that servers may read differently, of a page or a name that is not the gateway's, without a key.
_ANYWHERE = (400, 401, 403, 421, 429, 503)
_PASSED_ON = "What else the upstream answers with, passed on with its status; or 500, a fault of the gateway."
_REQUEST_HEADERS: dict[str, tuple[str, Json]] = {
    "Cache-Control": (
        "no-cache, no-store, only-if-cached, max-age, max-stale and min-fresh (RFC 9111).",
        {**TEXT, "examples": ["no-cache"]},
    ),
    "x-keepgate-max-risk": (
        "The highest risk of a wrong answer from the semantic cache; 0 for exact answers only.",
        {"type": "number", "minimum": 0, "maximum": 1},
    ),
    "x-keepgate-threshold": (
        "Serve the answer of any question that is at least so similar, whatever its risk, where the setting"
        " `semantic.request_threshold` allows it.",
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    ),
    "x-keepgate-tags": (
        "At most 16 names for the answer, with commas between, for a purge of all answers of a name.",
        {**TEXT, "examples": ["docs-v7, product:keyboards"]},
    ),
    "x-keepgate-profile": ("Say in `Server-Timing` where the time went.", {**TEXT, "examples": ["1"]}),
    "x-keepgate-reuse": ("Whether a next turn is expected.", {"enum": ["conversation", "one-shot"]}),
    "anthropic-version": ("Of Anthropic's API.", {**TEXT, "examples": ["2023-06-01"]}),
    "anthropic-beta": ("Features of Anthropic's API.", TEXT),
}
_RESPONSE_HEADERS: dict[str, tuple[str, Json]] = {
    "x-keepgate-cache": ("How the cache took part.", {"enum": ["hit", "miss", "bypass"]}),
    "x-keepgate-layer": ("Of a hit, which layer had it.", {"enum": ["exact", "normalized", "semantic", "none"]}),
    "x-keepgate-entry": ("The id under which the answer is stored, if it is.", TEXT),
    "x-keepgate-similarity": ("How near the nearest question was.", {"type": "number"}),
    "x-keepgate-risk": ("How probably its answer is wrong for this one.", {"type": "number"}),
    "x-keepgate-veto": ("The veto without which its answer would have been served.", TEXT),
    "x-keepgate-prefix-tokens": ("Prompt tokens that the engine did not compute again.", {"type": "integer"}),
    "x-keepgate-model": ("The model that has answered, where the request named another one.", TEXT),
    "x-keepgate-cost": (
        "US dollars that the request cost. Of a streamed answer that was computed it is a trailer, if the request has"
        " `TE: trailers`.",
        {"type": "number", "minimum": 0},
    ),
    "x-keepgate-saving": ("US dollars that the cache has saved.", {"type": "number", "minimum": 0}),
    "x-keepgate-ignored-fields": ("Fields of the request that had no meaning for what answered it.", TEXT),
    "Cache-Status": ("The same in the standard form, with the reason of a miss or bypass (RFC 9211).", TEXT),
    "Age": ("Seconds since the answer was computed (RFC 9111).", {"type": "integer", "minimum": 0}),
}
_KEY = "Passed on to the upstream. Each key is a tenant with a cache of its own."
_SECURITY_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer", "description": _KEY},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": _KEY},
    "admin-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-keepgate-admin-key",
        "description": "The setting admin_key; it may also be the bearer token. Without that setting only a gateway on"
        " the loopback answers operators, whatever they send.",
    },
}
_DESCRIPTION = (
    "A caching gateway in front of LLM backends. A field that is not described here is passed on to the upstream. HEAD"
    " is answered wherever GET is. When an answer fails after its stream has begun, the last event or line is an error,"
    " and what ends a complete stream is missing."
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def openapi_handler(application: web.Application) -> Handler:
    """The handler of GET /openapi.json."""
    documents: list[bytes] = []

    async def show(request: web.Request) -> web.Response:
        if not documents:
            documents.append(msgspec.json.encode(document(application)))
        return web.Response(body=documents[0], content_type=JSON)

    return show


def document(application: web.Application) -> Json:
    """The OpenAPI 3.1 document of all routes. Raises KeyError for a route that operations.py does not describe."""
    paths: dict[str, Json] = {}
    words = [_DESCRIPTION]
    described = []
    for method, path in routes(application):
        if method == "*":
            words.append(IN_WORDS[path])
        else:
            described.append((method, path, OPERATIONS[method, path]))
    schemas, components = _schemas(operation for _, _, operation in described)
    for method, path, operation in described:
        paths.setdefault(path, {})[method.lower()] = _described(method, path, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Keepgate", "version": "1", "description": "\n\n".join(words)},
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": _error_responses(),
            "headers": {name: _header(name) for name in _RESPONSE_HEADERS},
            "securitySchemes": _SECURITY_SCHEMES,
        },
    }


def routes(application: web.Application) -> Iterator[tuple[str, str]]:
    """Method and path of each route. A HEAD beside a GET is left out."""
    for route in application.router.routes():
        assert route.resource is not None  # noqa: S101  # the application has no routes of the system
        if route.method != "HEAD":
            yield route.method, route.resource.canonical


def _schemas(operations: Iterable[Operation]) -> tuple[Callable[[Schema], Json], Json]:
    """What makes the schema of a type, and the components to which such schemas refer."""
    contents = [
        content
        for operation in operations
        for content in (operation.body, operation.answer, *operation.further.values())
    ]
    types = {kind: None for content in contents for schema in content.values() for kind in _types(schema)}
    types |= dict.fromkeys((OpenAIError, AnthropicError, OllamaError))
    made, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(types, made, strict=True))

    def schema_of(schema: Schema) -> Json:
        if isinstance(schema, tuple):
            return {"anyOf": [schema_of(each) for each in schema]}
        return schema if isinstance(schema, dict) else by_type[schema]

    return schema_of, {name: _open(schema) for name, schema in sorted(components.items())}


def _types(schema: Schema) -> Iterator[Any]:
    for each in schema if isinstance(schema, tuple) else (schema,):
        if not isinstance(each, dict):
            yield each


def _open(schema: Json) -> Json:
    """The schema of an object, which has other fields too unless it says that it has none."""
    described = {"description": inspect.cleandoc(schema["description"])} if "description" in schema else {}
    return {"additionalProperties": True, **schema, **described}


def _described(method: str, path: str, operation: Operation, schema_of: Callable[[Schema], Json]) -> Json:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": operation.path.get(name, TEXT)}
        for name in re.findall(r"{(\w+)}", path)
    ]
    parameters += [
        {"name": given.name, "in": "query", "description": given.description, "schema": given.schema}
        for given in operation.query
    ]
    parameters += [
        {"name": name, "in": "header", "description": text, "schema": schema}
        for name, (text, schema) in ((name, _REQUEST_HEADERS[name]) for name in operation.sent)
    ]
    described: Json = {
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": dict(_responses(path, operation, schema_of)),
    }
    if operation.description:
        described["description"] = operation.description
    if parameters:
        described["parameters"] = parameters
    if operation.body:
        described["requestBody"] = {"required": True, "content": _content(operation.body, schema_of)}
    if operation.operator:
        described["security"] = [{"admin-key": []}, {"bearer": []}, {}]
    return described


def _responses(path: str, operation: Operation, schema_of: Callable[[Schema], Json]) -> Iterator[tuple[str, Json]]:
    answer = {"description": operation.summary + ".", "content": _content(operation.answer, schema_of)}
    headers: Json = {name: {"required": True, **_header(name)} for name in operation.told}
    headers |= {name: {"$ref": f"#/components/headers/{name}"} for name in operation.may_tell}
    yield "200", {**answer, **({"headers": headers} if headers else {})}
    for status, content in operation.further.items():
        yield str(status), {"description": operation.summary + ", or not.", "content": _content(content, schema_of)}
    form = _ERROR_FORMS.get(form_of(path).family, OpenAIError).__name__
    operators = (401, 403) if operation.operator else ()
    last = ("default",) if operation.passes_on else (500,)
    for status in (*sorted({*_ANYWHERE, *operation.errors, *operators}), *last):
        yield str(status), {"$ref": f"#/components/responses/{form}.{status}"}


def _error_responses() -> Json:
    """Every error in every form of API."""
    described: Json = {}
    for form in (OpenAIError, AnthropicError, OllamaError):
        content = {JSON: {"schema": {"$ref": _REF.format(name=form.__name__)}}}
        for status, reason in _REASONS.items():
            described[f"{form.__name__}.{status}"] = {"description": reason, "content": content}
        described[f"{form.__name__}.default"] = {"description": _PASSED_ON, "content": {**content, "*/*": {}}}
    return described


def _header(name: str) -> Json:
    text, schema = _RESPONSE_HEADERS[name]
    return {"description": text, "schema": schema}


def _content(content: Mapping[str, Schema], schema_of: Callable[[Schema], Json]) -> Json:
    return {kind: {"schema": schema_of(schema)} for kind, schema in content.items()}
