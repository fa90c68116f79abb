"""Ollama's API beside its two endpoints that answer a prompt: models, embeddings, and requests that only load."""

import time

import msgspec
from aiohttp import web

from gateway.api.app_keys import EMBEDDINGS, ROUTER, ROUTING, SETTINGS
from gateway.api.handlers import answer, listed_models
from gateway.errors import GatewayError, InvalidRequest, NotFound, UpstreamDisconnected, refusal
from gateway.http.body import read_body
from gateway.http.json_object import decode_object
from gateway.proxy.embeddings import PATH, parse_embeddings
from gateway.proxy.inference_request import no_such_path
from gateway.proxy.response_headers import IGNORED_HEADER
from gateway.routing.call import RouteCall
from gateway.surfaces.ollama import embeddings, models
from gateway.surfaces.ollama.loading import is_load, load_answer
from gateway.surfaces.surface import Json
from gateway.telemetry.record import RECORD
from gateway.tenants.caller import CALLER
from gateway.upstreams.upstream import Attempt

_encode = msgspec.json.Encoder().encode
_MAX_SHOWN_BYTES = 2**23


async def answer_or_load(request: web.Request) -> web.StreamResponse:
    """POST /api/chat and /api/generate. A request without a prompt asks for its model to be loaded, which it is."""
    fields = await _fields(request)
    if is_load(request.path, fields):
        await _known_model(request, fields)
        return _loaded(request, fields)
    return await answer(request)


async def embed(request: web.Request) -> web.Response:
    """POST /api/embed and /api/embeddings."""
    fields = await _fields(request)
    if is_load(request.path, fields):
        await _known_model(request, fields)
        return _loaded(request, fields)
    model = models.known_as(_name(fields), request.app[ROUTER].models)
    asked = embeddings.embed_request(request.path, fields)
    sent = {name: value for name, value in asked.fields.items() if name not in asked.ignored} | {"model": model}
    settings = request.app[SETTINGS]
    parsed = parse_embeddings(
        PATH, _encode(sent), request.headers, request[CALLER], settings.cache, request.app[ROUTING].models
    )
    if parsed is None:
        raise InvalidRequest("'input' must be text or a list of texts, and not empty.", param="input")
    reply = await request.app[EMBEDDINGS].answer(parsed, request[RECORD].span)
    body = reply.body if isinstance(reply.body, bytes) else b""
    if reply.status != 200:
        raise refusal(reply.status, body)
    translated = embeddings.embed_answer(request.path, msgspec.json.decode(body))
    headers = {name: value for name, value in reply.headers.items() if name.lower().startswith(("x-", "cache-"))}
    if asked.ignored:
        headers[IGNORED_HEADER] = ", ".join(asked.ignored)
    return web.Response(body=_encode(translated), content_type="application/json", headers=headers)


def _loaded(request: web.Request, fields: Json) -> web.Response:
    named = {**fields, "model": fields.get("model") or fields["name"]}
    return _json(load_answer(request.path, named, time.time()))


async def list_models(request: web.Request) -> web.Response:
    """GET /api/tags."""
    return _json(models.tags(await listed_models(request)))


async def list_running(request: web.Request) -> web.Response:
    """GET /api/ps."""
    return _json(models.ps(await listed_models(request)))


async def show_version(request: web.Request) -> web.Response:
    """GET /api/version."""
    return _json(models.version())


async def show(request: web.Request) -> web.Response:
    """POST /api/show: from an upstream that has it, else from what the model's upstream says of it."""
    fields = await _fields(request)
    model = await _known_model(request, fields)
    body = _encode({**fields, "model": model["id"]})
    native = Attempt("/api/show", body, needs="/api/show", lacking=no_such_path)
    try:
        return _json(await _asked(request, "POST", native, model["id"]))
    except NotFound:
        pass
    try:
        info = await _asked(
            request, "GET", Attempt("/v1/model/info", None, needs="/v1/model/info", lacking=no_such_path), model["id"]
        )
    except GatewayError:
        info = None  # only the in-repo engine describes its model
    return _json(models.show(model, info))


async def pull(request: web.Request) -> web.Response:
    """POST /api/pull: a model of the upstreams is there; another cannot be fetched from here."""
    fields = await _fields(request)
    await _known_model(request, fields)
    return _json({"status": "success"})


async def _asked(request: web.Request, method: str, attempt: Attempt, model: str) -> Json:
    """What an upstream says. Raises NotFound where it does not have this, and UpstreamError."""
    caller = request[CALLER]
    call = RouteCall(
        method=method,
        headers=caller.forwarded(request.headers),
        attempts=[attempt],
        model=model,
        otherwise=NotFound(f"There is no {attempt.path}."),
        own=caller.own,
        namespace=caller.namespace,
    )
    with await request.app[ROUTER].request(call) as reply:
        body = await reply.body(_MAX_SHOWN_BYTES)
    if reply.status != 200:
        raise refusal(reply.status, body)
    try:
        return decode_object(body)
    except InvalidRequest as error:
        raise UpstreamDisconnected(f"The upstream answers {attempt.path} with no JSON object.") from error


async def _known_model(request: web.Request, fields: Json) -> Json:
    """The listed model that the request names. Raises NotFound."""
    name = _name(fields)
    listed = {model["id"]: model for model in await listed_models(request)}
    known = models.known_as(name, listed)
    if known not in listed:
        raise NotFound(f"model '{name}' not found", param="model")
    return listed[known]


def _name(fields: Json) -> str:
    """The model that the request names, in `model` or, as older clients do, in `name`."""
    name = fields.get("model") or fields.get("name")
    if not isinstance(name, str):
        raise InvalidRequest("'model' must be the name of a model, as listed by GET /api/tags.", param="model")
    return name


async def _fields(request: web.Request) -> Json:
    settings = request.app[SETTINGS]
    return decode_object(await read_body(request, settings.max_body, settings.timeouts.client))


def _json(value: Json) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
