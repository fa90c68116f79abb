"""An answer as server-sent events, in pieces as they are generated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import msgspec
from aiohttp import web

from backend.api.generate import OutputStream
from backend.api.http_body import PREFIX_HEADER
from backend.api.http_server import UNEXPECTED
from backend.engine.engine import Output
from backend.errors import ErrorResponse, RequestError
from backend.responses.builder import Answer, ResponseBuilder

logger = logging.getLogger(__name__)

SEND_TIMEOUT_SECONDS = 60.0
"""A reader that takes nothing for so long is cut off, and its sequences with it."""
_USAGE_HEADER = "x-keepgate-usage"


async def stream(
    request: web.Request, answer: ResponseBuilder, arrivals: OutputStream, include_usage: bool
) -> web.StreamResponse:
    """Sends an answer while it is generated.

    Args:
        include_usage: whether the caller asked for usage. A gateway in front may want it all the same; the response's
            header tells it then to keep the chunk to itself.
    """
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    )
    if usage_added := not include_usage and request.headers.get(_USAGE_HEADER) == "always":
        response.headers[_USAGE_HEADER] = "added"
    # Headers wait for the first token: until then a failure can still be an honest status.
    events = _events(answer, arrivals, include_usage or usage_added)
    first = await anext(events)
    response.headers[PREFIX_HEADER] = str(answer.cached_tokens)
    await response.prepare(request)
    try:
        await _send(response, first)
        async for event in events:
            await _send(response, event)
    except RequestError as error:
        # The status has been sent: an error event, and no [DONE], say that the answer is not whole.
        await _send(response, _event(error.answer()))
    except (ConnectionResetError, asyncio.CancelledError):
        raise
    except TimeoutError:
        logger.warning("a reader took nothing for %.0f s and was cut off", SEND_TIMEOUT_SECONDS)
        if request.transport is not None:
            request.transport.abort()
        return response
    except Exception:
        logger.exception("unexpected failure in a stream")
        await _send(response, _event(UNEXPECTED.answer()))
    await response.write_eof()
    return response


async def _events(answer: ResponseBuilder, arrivals: OutputStream, with_usage: bool) -> AsyncIterator[bytes]:
    """The body of a stream, in pieces worth sending together."""
    opening = b"".join(map(_event, answer.opening()))
    while arrivals.more:
        arrived: dict[int, list[Output]] = {}
        for index, output in await arrivals.take():
            arrived.setdefault(index, []).append(output)
        chunks = [chunk for index in sorted(arrived) for chunk in answer.chunks(index, arrived[index])]
        if chunks or opening:
            yield opening + b"".join(map(_event, chunks))
            opening = b""
    usage = _event(answer.usage_chunk()) if with_usage else b""
    yield usage + b"data: [DONE]\n\n"


async def _send(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
        await response.write(data)


def _event(value: Answer | ErrorResponse) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
