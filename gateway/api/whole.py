"""Endpoints whose whole answer is a function of the request: moderations, reranking, scores, audio, images."""

import asyncio
import functools

from aiohttp import web

from gateway.api.app_keys import PIPELINE, ROUTING, SETTINGS
from gateway.api.handlers import LARGE_BODY, forward
from gateway.errors import InvalidRequest
from gateway.http.body import read_body
from gateway.proxy.inference_request import parse_whole
from gateway.surfaces.whole import whole_request
from gateway.tenants.caller import CALLER


async def answer(request: web.Request) -> web.StreamResponse:
    """POST to such an endpoint. A request whose answer may differ from one time to the next is relayed as it is.

    So is a form that cannot be read: its upstream may be more lenient.
    """
    settings = request.app[SETTINGS]
    body = await read_body(request, settings.max_body, settings.timeouts.client)
    read = functools.partial(whole_request, request.path, request.headers.get("Content-Type", ""), body)
    # Hashing the files of a form takes a millisecond for each megabyte: it leaves the event loop.
    try:
        asked = await asyncio.to_thread(read) if len(body) > LARGE_BODY else read()
    except InvalidRequest:
        if request.content_type == "application/json":
            raise
        asked = None
    if asked is None:
        return await forward(request)
    query = request.raw_path.partition("?")[2]
    return await request.app[PIPELINE].answer(
        request,
        parse_whole(
            asked, request.path, query, body, request.headers, request[CALLER], settings, request.app[ROUTING].models
        ),
    )
