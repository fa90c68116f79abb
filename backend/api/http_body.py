"""One exchange over HTTP: a body comes in, and JSON goes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from backend.errors import BodyTooLarge, InvalidRequest, RequestError

MAX_BODY_BYTES = 4 * 2**20
LARGE_BODY_BYTES = 16 * 2**10
"""What reading such a body takes is too much work for the event loop."""
PREFIX_HEADER = "x-keepgate-prefix-tokens"
"""Of a response: prompt tokens whose keys and values were there already."""
BODY_TIMEOUT_SECONDS = 30.0
"""A sender gets so long for its body."""
ARRIVED: web.RequestKey[float] = web.RequestKey("ARRIVED")
"""``time.monotonic()`` when the request's head had been read, which is when its caller began to wait."""

Read = TypeVar("Read")


async def read_body(request: web.Request) -> bytes:
    """The whole body; notes when the request arrived.

    Raises:
        InvalidRequest, BodyTooLarge, RequestError: it cannot be had.
    """
    request[ARRIVED] = time.monotonic()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"the body is over the limit of {MAX_BODY_BYTES} bytes") from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(
            "the body cannot be read: it ends early, or does not fit its Content-Encoding or Transfer-Encoding"
        ) from error
    except TimeoutError as error:
        raise _SlowSender(f"the body did not arrive within {BODY_TIMEOUT_SECONDS:.0f} s") from error


async def off_loop(body: bytes, read: Callable[[], Read]) -> Read:
    """A small body is read in place; a large one in a thread, so that nobody's stream waits for its tokenizer."""
    return read() if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(read)


def json_response(value: object) -> web.Response:
    """A whole answer."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class _SlowSender(RequestError):
    status = 408
