"""Streams an answer as server-sent events while it is generated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping

import msgspec
from aiohttp import web

from backend.api.generate import OutputStream
from backend.api.http_body import PREFIX_HEADER
from backend.api.http_server import UNEXPECTED
from backend.api.traces import tell_timings
from backend.engine.output_processor import Output
from backend.errors import ErrorResponse, RequestError
from backend.responses.builder import ResponseBody, ResponseBuilder

logger = logging.getLogger(__name__)

SEND_TIMEOUT_SECONDS = 60.0
"""A client that reads nothing for so long is disconnected, which ends its sequences."""


async def stream(
    request: web.Request,
    builder: ResponseBuilder,
    outputs: OutputStream,
    include_usage: bool,
    headers: Mapping[str, str],
) -> web.StreamResponse:
    """Sends an answer while it is generated.

    Args:
        include_usage: whether the caller asked for usage.
        headers: further ones of the response.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", **headers}
    )
    # The headers are sent with the first token: a failure before it can still have a status of its own.
    events = _events(builder, outputs, include_usage)
    first = await anext(events)
    response.headers[PREFIX_HEADER] = str(builder.cached_tokens)
    tell_timings(request, response.headers)
    await response.prepare(request)
    try:
        await _send(response, first)
        async for event in events:
            await _send(response, event)
    except RequestError as error:
        # The status has been sent: an error event and no [DONE] mark the answer as incomplete.
        await _send(response, _event(error.response()))
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except TimeoutError:
        logger.warning("a client read nothing for %.0f s and was disconnected", SEND_TIMEOUT_SECONDS)
        if request.transport is not None:
            request.transport.abort()
        return response
    except Exception:
        logger.exception("unexpected failure in a stream")
        await _send(response, _event(UNEXPECTED.response()))
    await response.write_eof()
    return response


async def _events(builder: ResponseBuilder, outputs: OutputStream, with_usage: bool) -> AsyncIterator[bytes]:
    """The body of a stream; each item holds all chunks that can be sent together."""
    opening = b"".join(map(_event, builder.opening_chunks()))
    while not outputs.finished:
        arrived: dict[int, list[Output]] = {}
        for index, output in await outputs.next_outputs():
            arrived.setdefault(index, []).append(output)
        chunks = [chunk for index in sorted(arrived) for chunk in builder.chunks(index, arrived[index])]
        if chunks or opening:
            yield opening + b"".join(map(_event, chunks))
            opening = b""
    usage = _event(builder.usage_chunk()) if with_usage else b""
    yield usage + b"data: [DONE]\n\n"


async def _send(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
        await response.write(data)


def _event(value: ResponseBody | ErrorResponse) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
