"""The OpenAI surface."""

import asyncio
import functools
from typing import Any

import msgspec
from aiohttp import web
from multidict import CIMultiDictProxy

from gateway import metrics
from gateway.api.app_keys import EMBEDDINGS, GAUGES, PIPELINE, ROUTER, SEMANTIC, SETTINGS
from gateway.errors import NotFound, UpstreamDisconnected, UpstreamError, UpstreamTimeout
from gateway.http.body import read_body
from gateway.http.response_writer import ResponseWriter
from gateway.http.sse import event_json
from gateway.proxy.embeddings import parse_embeddings
from gateway.proxy.inference_request import namespace_header, parse_request
from gateway.upstreams.upstream import Upstream

_encode = msgspec.json.Encoder().encode
_LARGE_BODY = 2**18
_LIST_DEADLINE = 5.0
_MAX_LISTED_BYTES = 8 * 2**20


async def answer(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions and /v1/completions."""
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    query = request.raw_path.partition("?")[2]
    read = functools.partial(
        parse_request,
        request.path,
        query,
        body,
        request.headers,
        settings.cache.namespace,
        settings.semantic.mode != "off",
    )
    # Decoding a long body takes milliseconds: it leaves the event loop.
    call = await asyncio.to_thread(read) if len(body) > _LARGE_BODY else read()
    return await request.app[PIPELINE].answer(request, call)


async def embed(request: web.Request) -> web.StreamResponse:
    """POST /v1/embeddings. A body that is not in OpenAI's form is relayed as it is."""
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    read = functools.partial(
        parse_embeddings, request.rel_url.raw_path_qs, body, request.headers, settings.cache.namespace
    )
    asked = await asyncio.to_thread(read) if len(body) > _LARGE_BODY else read()
    return await forward(request) if asked is None else await request.app[EMBEDDINGS].answer(asked)


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models: what all upstreams list that answer in time, each model once."""
    upstreams = request.app[ROUTER].candidates(None)
    replies = await asyncio.gather(*(_listed(upstream, request.headers) for upstream in upstreams))
    listed = [model for reply in replies if isinstance(reply, list) for model in reply]
    if listed or any(isinstance(reply, list) for reply in replies):
        return _json(
            {"object": "list", "data": list({model["id"]: model for model in reversed(listed)}.values())[::-1]}
        )
    for reply in replies:
        if isinstance(reply, web.Response):
            return reply
    raise next(reply for reply in replies if isinstance(reply, UpstreamError))


async def _listed(
    upstream: Upstream, headers: CIMultiDictProxy[str]
) -> list[dict[str, Any]] | web.Response | UpstreamError:
    """The models of one upstream, or its error response, or why it could not be asked."""
    try:
        async with asyncio.timeout(_LIST_DEADLINE):
            with await upstream.request("GET", "/v1/models", headers, None) as reply:
                body = await reply.body(_MAX_LISTED_BYTES)
            if reply.status != 200:
                return web.Response(status=reply.status, body=body, headers=reply.headers)
            models: list[dict[str, Any]] = event_json(body)["data"]
            if not all(isinstance(model["id"], str) for model in models):
                raise TypeError("an id is not text")
            return models
    except UpstreamError as error:
        return error
    except TimeoutError:
        return UpstreamTimeout(f"{upstream.name} did not list its models in {_LIST_DEADLINE:g} s.")
    except (ValueError, TypeError, KeyError):
        return UpstreamDisconnected(f"{upstream.name} lists its models in a form that OpenAI's API does not have.")


async def forward(request: web.Request) -> web.StreamResponse:
    """Any other request under /v1: relayed as it is, never cached."""
    if ".." in request.path.split("/"):  # it would leave the upstream's API
        raise NotFound(f"There is no {request.method} {request.path}.")
    if _is_inside_prefix_store(request.path):
        raise NotFound(f"There is no {request.method} {request.path}; an operator uses /v1/cache/prefix.")
    settings = request.app[SETTINGS]
    body = None
    if request.can_read_body or request.body_exists:
        body = await read_body(request, settings.max_body, settings.timeouts.client)
    model = request.match_info.get("model") or _model_named_in(body)
    path = request.rel_url.raw_path_qs
    own = namespace_header(request.headers, settings.cache.namespace)
    with await request.app[ROUTER].request(request.method, path, request.headers, body, model, own) as reply:
        headers = reply.headers
        headers.add("Cache-Status", "keepgate; fwd=bypass; detail=endpoint")
        headers["x-keepgate-cache"] = "bypass"
        headers["x-keepgate-layer"] = "none"
        response = web.StreamResponse(status=reply.status, headers=headers)
        chunks = reply.chunks()
        first = await anext(chunks, b"")  # a failure before the first byte can still be an error response
        await response.prepare(request)
        writer = ResponseWriter(request, response, settings.timeouts.client)
        await writer.send(first)
        async for chunk in chunks:
            await writer.send(chunk)
        await writer.finish()
        return response


def _is_inside_prefix_store(path: str) -> bool:
    """Whether an upstream might take the path for one of its prefix store, which is the operator's: what is pinned or
    removed there concerns all tenants. `path` is unquoted.
    """
    return [part for part in path.split("/") if part not in ("", ".")][1:2] == ["prefix"]


class _ModelField(msgspec.Struct):
    """The one field of another endpoint's body that the gateway reads, to choose the upstream."""

    model: str | None = None


def _model_named_in(body: bytes | None) -> str | None:
    if body is None or len(body) > _LARGE_BODY:
        return None
    try:
        return msgspec.json.decode(body, type=_ModelField).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


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
