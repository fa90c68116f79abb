"""The OpenAI surface."""

import asyncio
import functools
from typing import Any

import msgspec
from aiohttp import web

from gateway import metrics
from gateway.body import read_body
from gateway.call import read_call
from gateway.errors import NotFound, UpstreamError
from gateway.keys import GAUGES, PIPELINE, ROUTER, SETTINGS
from gateway.streaming import event_json

_encode = msgspec.json.Encoder().encode
_LARGE_BODY = 2**18


async def answer(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions and /v1/completions."""
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    query = request.raw_path.partition("?")[2]
    read = functools.partial(read_call, request.path, query, body, request.headers, settings.cache.namespace)
    # A long body takes more than a moment to decode: other requests do not wait for it.
    call = await asyncio.to_thread(read) if len(body) > _LARGE_BODY else read()
    return await request.app[PIPELINE].answer(request, call)


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models: what all reachable upstreams list, each model once."""
    models: dict[Any, Any] = {}
    refusal: web.Response | None = None
    fault: UpstreamError | None = None
    router = request.app[ROUTER]
    for upstream in router.candidates(None):
        try:
            async with upstream.request("GET", "/v1/models", request.headers, None) as reply:
                body = b"".join([piece async for piece in reply.pieces()])
                if reply.status != 200:
                    refusal = web.Response(status=reply.status, body=body, headers=reply.headers)
                    continue
                for model in event_json(body).get("data") or ():
                    models.setdefault(model["id"], model)
        except UpstreamError as error:
            fault = error
        except (ValueError, TypeError, KeyError):
            fault = UpstreamError(f"{upstream.name} lists its models in a form that OpenAI's API does not have.")
    if models:
        return _json({"object": "list", "data": list(models.values())})
    if refusal is not None:
        return refusal
    if fault is not None:
        raise fault
    return _json({"object": "list", "data": []})


async def forward(request: web.Request) -> web.StreamResponse:
    """Any other request under /v1: relayed as it is, never cached."""
    if ".." in request.path.split("/"):  # it would lead out of the upstream's API, to whatever else its host serves
        raise NotFound(f"There is no {request.method} {request.path}.")
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client) if request.can_read_body else None
    model = request.match_info.get("model")
    path = request.raw_path
    async with request.app[ROUTER].request(request.method, path, request.headers, body, model) as reply:
        headers = reply.headers
        headers.add("Cache-Status", "keepgate; fwd=bypass; detail=endpoint")
        headers["x-keepgate-cache"] = "bypass"
        headers["x-keepgate-layer"] = "none"
        response = web.StreamResponse(status=reply.status, headers=headers)
        pieces = reply.pieces()
        first = await anext(pieces, b"")  # a failure before the first byte can still be an error response
        await response.prepare(request)
        await response.write(first)
        async for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response


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
    return web.Response(body=metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=_encode(value), content_type="application/json")
