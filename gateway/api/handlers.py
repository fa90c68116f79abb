"""Endpoints that answer a prompt, in every form of API; models; what is relayed; health and metrics."""

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from cache.errors import StoreUnavailable
from gateway import metrics
from gateway.api.anthropic import model_info, models_page
from gateway.api.app_keys import (
    ADMISSIONS,
    CONVERSATIONS,
    EMBEDDINGS,
    GAUGES,
    PIPELINE,
    ROUTER,
    ROUTING,
    SEMANTIC,
    SETTINGS,
)
from gateway.errors import (
    CacheUnavailable,
    InvalidRequest,
    NotFound,
    UpstreamDisconnected,
    UpstreamError,
    UpstreamTimeout,
    refusal,
)
from gateway.http.body import read_body
from gateway.http.fetched_urls import check_urls
from gateway.http.json_object import relayed_fields
from gateway.http.multipart import multipart_fields, text_of
from gateway.http.response_writer import ResponseWriter
from gateway.http.sse import event_json
from gateway.proxy import conversations
from gateway.proxy.deadlines import deadline_in, timeout_of, wait_until
from gateway.proxy.embeddings import parse_embeddings
from gateway.proxy.inference_request import InferenceRequest, parse_request
from gateway.proxy.model_names import NO_FACTS, resolved
from gateway.routing.call import RouteCall
from gateway.surfaces.registry import PROBED_PATHS
from gateway.surfaces.surface import Json
from gateway.telemetry.record import RECORD
from gateway.tenants.admission import Admission
from gateway.tenants.caller import CALLER
from gateway.tenants.policies import allows_model, check_endpoint, check_model
from gateway.upstreams.identity import with_own_model
from gateway.upstreams.upstream import Attempt, Upstream

_encode = msgspec.json.Encoder().encode
LARGE_BODY = 2**18
_LIST_DEADLINE = 5.0
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_MAX_LISTED_BYTES = 8 * 2**20


async def answer(request: web.Request) -> web.StreamResponse:
    """POST to an endpoint that answers a prompt, in any form of API."""
    with request[RECORD].span.span("request.read"):
        call = await _call(request)
    return await request.app[PIPELINE].answer(request, call)


async def _call(request: web.Request) -> InferenceRequest:
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    if request.path in PROBED_PATHS:
        await request.app[ROUTER].refreshed.wait()  # which upstreams have this form of API; asked for a few seconds
    read = functools.partial(
        parse_request,
        request.path,
        request.raw_path.partition("?")[2],
        body,
        request.headers,
        request[CALLER],
        settings,
        request.app[ROUTER],
        request.app[ROUTING].models,
    )
    if request.path == conversations.PATH:
        read = functools.partial(read, conversation=await _conversation(request, body))
    # Decoding a long body takes milliseconds: it leaves the event loop.
    return await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()


async def _conversation(request: web.Request, body: bytes) -> Sequence[Json] | None:
    try:
        loading = request.app[CONVERSATIONS].continued_by(request[CALLER].namespace, body)
        return await wait_until(deadline_in(timeout_of(request.headers)), loading)
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The response to continue cannot be looked up: {error}.") from error


async def embed(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings. A body that is not in OpenAI's form is relayed as it is."""
    settings, span = request.app[SETTINGS], request[RECORD].span
    with span.span("request.read"):
        body = await read_body(request, settings.max_body, settings.timeouts.client)
        path, caller = request.rel_url.raw_path_qs, request[CALLER]
        read = functools.partial(
            parse_embeddings, path, body, request.headers, caller, settings.cache, request.app[ROUTING].models
        )
        asked = await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()
    if asked is None:
        return await forward(request)
    check_urls(asked.fields, settings.security.urls)
    return await request.app[EMBEDDINGS].answer(asked, span)


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models, for Anthropic's clients in their form."""
    models = await listed_models(request)
    return _json(models_page(models) if "anthropic-version" in request.headers else {"object": "list", "data": models})


async def show_model(request: web.Request) -> web.StreamResponse:
    """GET /v1/models/{model}, from an upstream that has it; for Anthropic's clients in their form, from the list."""
    name, is_anthropic = request.match_info["model"], "anthropic-version" in request.headers
    if not is_anthropic and name not in request.app[ROUTING].models.names:
        return await forward(request)
    for model in await listed_models(request):
        if model["id"] == name:
            return _json(model_info(model) if is_anthropic else model)
    raise NotFound(f"The model {name!r} does not exist.")


async def listed_models(request: web.Request) -> list[Json]:
    """What all upstreams list that answer in time, and names that the settings have for it: of each model that the
    caller may use, once.

    Raises UpstreamError where none answers.
    """
    caller = request[CALLER]
    upstreams = request.app[ROUTER].candidates(None)
    headers = caller.forwarded(request.headers)
    replies = await asyncio.gather(*(_listed(upstream, headers) for upstream in upstreams))
    if all(isinstance(reply, UpstreamError) for reply in replies):
        raise next(reply for reply in replies if isinstance(reply, UpstreamError))
    listed = [model for reply in replies if isinstance(reply, list) for model in reply]
    table = request.app[ROUTING].models
    models = {model["id"]: model for model in reversed(listed)}
    names = dict(reversed(models.items()))
    for name in sorted(table.names - models.keys()):
        if (answering := models.get(table.resolve(name, NO_FACTS).model)) is not None:
            names[name] = {**answering, "id": name}
    return [model for name, model in names.items() if allows_model(caller, table.unaliased(name))]


async def _listed(upstream: Upstream, headers: CIMultiDictProxy[str]) -> list[Json] | UpstreamError:
    """The models of one upstream, or why it did not list them."""
    try:
        async with asyncio.timeout(_LIST_DEADLINE):
            with await upstream.request("GET", "/v1/models", headers, None) as reply:
                body = await reply.body(_MAX_LISTED_BYTES)
            if reply.status != 200:
                return refusal(reply.status, body)
            models: list[Json] = event_json(body)["data"]
            if not all(isinstance(model["id"], str) for model in models):
                raise TypeError("an id is not text")
            return models
    except UpstreamError as error:
        return error
    except TimeoutError:
        return UpstreamTimeout(f"{upstream.title} did not list its models in {_LIST_DEADLINE:g} s.")
    except (ValueError, TypeError, KeyError):
        return UpstreamDisconnected(f"{upstream.title} lists its models in a form that OpenAI's API does not have.")


async def forward(request: web.Request) -> web.StreamResponse:
    """Any other request under /v1: relayed as it is, never cached. A key may use few of them."""
    if ".." in request.path.split("/"):  # it would leave the upstream's API
        raise NotFound(f"There is no {request.method} {request.path}.")
    if _is_inside_prefix_store(request.path):
        raise NotFound(f"There is no {request.method} {request.path}; an operator uses /v1/cache/prefix.")
    settings, caller = request.app[SETTINGS], request[CALLER]
    check_endpoint(caller, request.method, request.path, settings.keys.relayed)
    body = None
    if request.can_read_body or request.body_exists:
        body = await read_body(request, settings.max_body, settings.timeouts.client)
    fields: Json = {}
    if body:  # decoding a long one takes milliseconds: it leaves the event loop
        read = functools.partial(_fields_of, request.headers.get("Content-Type", ""), body)
        fields = await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()
        check_urls(fields, settings.security.urls)
    named = request.match_info.get("model") or fields.get("model")
    model = None
    if isinstance(named, str):
        model = resolved(request.app[ROUTING].models, named, fields, request.headers, caller).model
        body = with_own_model(body, {named: model}) if body and model != named else body
    elif body:  # a key with a list of models has none that is not named
        check_model(caller, "")
    path = request.rel_url.raw_path_qs
    call = RouteCall(
        method=request.method,
        headers=caller.forwarded(request.headers),
        attempts=[Attempt(path, body)],
        model=model,
        own=caller.own,
        namespace=caller.namespace,
        is_repeatable=request.method in _SAFE_METHODS,
        deadline=deadline_in(timeout_of(request.headers)),
    )
    async with request.app[ADMISSIONS].other(caller, body) as admission:
        return await _relayed(request, call, admission)


async def _relayed(request: web.Request, call: RouteCall, admission: Admission) -> web.StreamResponse:
    with await request.app[ROUTER].request(call) as reply:
        admission.settle(0, 0)
        headers = reply.headers
        headers.update(admission.headers)
        headers.add("Cache-Status", "keepgate; fwd=bypass; detail=endpoint")
        headers["x-keepgate-cache"] = "bypass"
        headers["x-keepgate-layer"] = "none"
        response = web.StreamResponse(status=reply.status, headers=headers)
        chunk = await reply.chunk()  # a failure before the first byte can still be an error response
        await response.prepare(request)
        writer = ResponseWriter(request, response, request.app[SETTINGS].timeouts.client)
        while chunk:
            await writer.send(chunk)
            chunk = await reply.chunk()
        await writer.finish()
        return response


def _is_inside_prefix_store(path: str) -> bool:
    """Whether an upstream might take the path for one of its prefix store, which is the operator's: what is pinned or
    removed there concerns all tenants. `path` is unquoted.
    """
    return [part for part in path.split("/") if part not in ("", ".")][1:2] == ["prefix"]


def _fields_of(content_type: str, body: bytes) -> Json:
    """The fields of a body that is relayed; of a form its model alone. Raises InvalidRequest."""
    if not content_type.lower().startswith("multipart/form-data"):
        return relayed_fields(body)
    try:
        return {"model": text_of(multipart_fields(content_type, body), "model")}
    except InvalidRequest:
        return {}


async def not_found(request: web.Request) -> web.Response:
    raise NotFound(f"There is no {request.method} {request.path}.")


async def health(request: web.Request) -> web.Response:
    """GET /health: the process answers."""
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: an upstream can be reached, so that a miss can be answered."""
    is_ready = request.app[ROUTER].ready
    return _json({"status": "ready" if is_ready else "starting"}, status=200 if is_ready else 503)


async def expose_metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    request.app[GAUGES].refresh()
    await request.app[SEMANTIC].measure()
    return web.Response(body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=_encode(value), content_type="application/json")
