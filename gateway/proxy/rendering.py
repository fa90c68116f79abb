"""A recorded answer in the shape a client wants: JSON, or a stream with or without usage."""

import asyncio

import msgspec

from cache.entries.answer import stream_of

_decode = msgspec.json.Decoder(dict).decode
_LARGE_BODY = 2**18


async def render(body: bytes, form: str) -> bytes:
    """The response object `body` (JSON text) in `form`: "json", "stream" or "stream+usage"."""
    if form == "json":
        return body
    if len(body) > _LARGE_BODY:  # takes milliseconds: it leaves the event loop
        return await asyncio.to_thread(_as_stream, body, form)
    return _as_stream(body, form)


def _as_stream(body: bytes, form: str) -> bytes:
    return stream_of(_decode(body), include_usage=form == "stream+usage")
