"""The Responses API beside its POST: a response by its id, its input, its deletion.

A response is kept here if it was translated; another may be one of an upstream that has this API.
"""

import msgspec
from aiohttp import web

from cache.errors import StoreUnavailable
from cache.stores.conversations import Record
from gateway.api.app_keys import CACHE, CONVERSATIONS, ROUTER, SEMANTIC
from gateway.api.handlers import forward
from gateway.errors import CacheUnavailable
from gateway.proxy.conversations import PATH
from gateway.surfaces.responses.stored_responses import deleted, input_items, response_not_found
from gateway.surfaces.surface import Json
from gateway.tenants.caller import CALLER

_encode = msgspec.json.Encoder().encode


async def get(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}."""
    record = await _record(request)
    return await _of_an_upstream(request) if record is None else _json(record.response)


async def get_input_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}/input_items."""
    record = await _record(request)
    return await _of_an_upstream(request) if record is None else _json(input_items(record, request.query))


async def delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/responses/{id}, and the answer in the cache."""
    response_id = request.match_info["id"]
    if (record := await _record(request)) is None:
        return await _of_an_upstream(request)
    try:
        await request.app[CONVERSATIONS].delete(_namespace(request), response_id)
        if record.entry:
            await request.app[CACHE].delete(record.entry)
            await request.app[SEMANTIC].forget(record.entry)
    except StoreUnavailable as error:
        raise _unavailable(error) from error
    return _json(deleted(response_id))


async def _record(request: web.Request) -> Record | None:
    try:
        return await request.app[CONVERSATIONS].record(_namespace(request), request.match_info["id"])
    except StoreUnavailable as error:
        raise _unavailable(error) from error


async def _of_an_upstream(request: web.Request) -> web.StreamResponse:
    """Raises NotFound where no upstream is known to have the API."""
    await request.app[ROUTER].refreshed.wait()
    if not request.app[ROUTER].may_have(PATH):
        raise response_not_found(request.match_info["id"])
    return await forward(request)


def _unavailable(error: StoreUnavailable) -> CacheUnavailable:
    return CacheUnavailable(f"The store that keeps responses does not answer: {error}.")


def _namespace(request: web.Request) -> str:
    return request[CALLER].namespace


def _json(value: Json) -> web.Response:
    return web.Response(body=_encode(value), content_type="application/json")
