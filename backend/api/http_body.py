"""Bodies of requests and responses."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
from aiohttp import web

from backend.errors import BodyTooLarge, InvalidRequest, RequestError

MAX_BODY_BYTES = 4 * 2**20
LARGE_BODY_BYTES = 16 * 2**10
"""Decoding and tokenizing a body of this size or more would block the event loop for too long."""
BODY_TIMEOUT_SECONDS = 30.0
"""Limit for the arrival of a whole body."""
PREFIX_HEADER = "x-keepgate-prefix-tokens"
"""Response header: prompt tokens whose keys and values were cached."""
RECEIVED_AT: web.RequestKey[float] = web.RequestKey("RECEIVED_AT")
"""``time.monotonic()`` when the request's head had been read, which is when its caller began to wait."""

_IGNORED_HEADER = "x-keepgate-ignored-fields"
_MAX_NAMES = 32
_MAX_NAME = 64

Result = TypeVar("Result")


async def read_body(request: web.Request) -> bytes:
    """Reads the whole body and sets ``request[RECEIVED_AT]``.

    Raises:
        InvalidRequest, BodyTooLarge, RequestError: the body is broken, too large or too slow.
    """
    request[RECEIVED_AT] = time.monotonic()
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
        raise _BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_SECONDS:.0f} s") from error


async def in_thread_if_large(body: bytes, work: Callable[[], Result]) -> Result:
    """Runs ``work`` on the body: on the event loop if the body is small, else in a thread."""
    return work() if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(work)


def ignored_header(fields: Iterable[str]) -> dict[str, str]:
    """The header that names the fields of a request without effect; none if there are none."""
    named = ", ".join(re.sub(r"[^!-~]|,", "?", name)[:_MAX_NAME] for name in itertools.islice(fields, _MAX_NAMES))
    return {_IGNORED_HEADER: named} if named else {}


def json_response(value: object) -> web.Response:
    """A response with status 200 and ``value`` as JSON."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class _BodyTimeout(RequestError):
    status = 408
