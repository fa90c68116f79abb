"""Reading a request's body: bounded in size and in time."""

import asyncio

from aiohttp import web

from gateway.errors import BodyTooLarge, InvalidRequest, RequestTimeout
from gateway.settings.fields import size_text


async def read_body(request: web.BaseRequest, limit: int, deadline: float) -> bytes:
    """The whole body, at most `limit` bytes, within `deadline` seconds.

    Raises BodyTooLarge, RequestTimeout, and InvalidRequest when the client stops half way.
    """
    if (request.content_length or 0) > limit:
        raise BodyTooLarge(f"The body is longer than {size_text(limit)}.")
    try:
        if request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(deadline):
            return await request.read()
    except TimeoutError as error:
        raise RequestTimeout(f"The body did not arrive within {deadline:g} s.") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise BodyTooLarge(f"The body is longer than {size_text(limit)}.") from error
    except (web.RequestPayloadError, ConnectionError, ValueError) as error:
        raise InvalidRequest(f"The body cannot be read: {error}.") from error
