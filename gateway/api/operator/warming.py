"""Warming the cache: requests that are computed in the background, at low priority, before anybody asks.

They are a batch (gateway/batches/): what the cache has is not computed again, and a batch goes on after a restart. So a
file that is sent again costs only what is new in it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.app_keys import SETTINGS
from gateway.api.batches import BATCHES, draft_in
from gateway.api.identification import caller_of
from gateway.batches.batch import ENDPOINTS, NewBatch, kept_headers
from gateway.batches.files import reporting_full_disk
from gateway.batches.threads import in_thread
from gateway.errors import BodyTooLarge, InvalidRequest, KeyRequired, NotFound, RequestTimeout
from gateway.settings.fields import size_text

_DEFAULT_PATH = "/v1/chat/completions"
_KEPT_SECONDS = 7 * 86_400
_LINES_AT_ONCE = 500
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


async def warm(request: web.Request) -> web.Response:
    """POST /v1/cache/warm: JSON Lines of requests for `?path=`, or of the lines of a batch; answers with the batch."""
    if (store := request.app.get(BATCHES)) is None or not request.app[SETTINGS].batches.enabled:
        raise NotFound("The cache is warmed by a batch, and batches are off (batches.enabled).")
    if (caller := caller_of(request)) is None:
        raise KeyRequired("Answers belong to a tenant: send the requests with its key, not with the admin key.")
    for field in request.query:
        if field != "path":
            raise InvalidRequest(f"'{field}' is no parameter of warming, which has path.", param=field)
    path = request.query.get("path", _DEFAULT_PATH)
    if path not in ENDPOINTS:
        raise InvalidRequest(f"'path' must be one of {', '.join(ENDPOINTS)}.", param="path")
    settings = request.app[SETTINGS]
    headers = kept_headers(request.headers, settings.cache.namespace, settings.cache.key_headers)
    with reporting_full_disk():
        async with draft_in(store) as draft:
            count = 0
            async for lines in _lines(request, settings.max_body):
                data = await asyncio.to_thread(_batch_lines, lines, count, path)
                if draft.size + len(data) > store.files.max_bytes:
                    raise BodyTooLarge(f"Requests to warm the cache have at most {size_text(store.files.max_bytes)}.")
                await in_thread(draft.write, data)
                count += len(lines)
            if not count:
                raise InvalidRequest("The body has no request: it must be JSON Lines, one request on each.")
            file = await in_thread(draft.commit, caller.namespace, "warm.jsonl", "batch", _KEPT_SECONDS)
        new = NewBatch(file.id, path, {"purpose": "warm"}, _KEPT_SECONDS)
        batch = await in_thread(store.create, caller.namespace, new, headers)
    store.created.set()
    return web.Response(body=_encode(batch), content_type="application/json")


async def _lines(request: web.Request, most: int) -> AsyncIterator[list[bytes]]:
    """The lines of the body that are not empty, some hundreds at a time. Raises BodyTooLarge and RequestTimeout."""
    timeout = request.app[SETTINGS].timeouts.client
    lines: list[bytes] = []
    rest = b""
    while True:
        try:
            async with asyncio.timeout(timeout):
                piece = await request.content.readany()
        except TimeoutError as error:
            raise RequestTimeout(f"Nothing of the requests arrived for {timeout:g} s.") from error
        *whole, rest = (rest + piece).split(b"\n") if piece else (rest, b"")
        if len(rest) > most or any(len(line) > most for line in whole):
            raise BodyTooLarge(f"A request has at most {size_text(most)} (max_body).")
        lines += [line for line in whole if line.strip()]
        while len(lines) > _LINES_AT_ONCE:
            yield lines[:_LINES_AT_ONCE]
            del lines[:_LINES_AT_ONCE]
        if not piece:
            if lines:
                yield lines
            return


def _batch_lines(lines: list[bytes], before: int, path: str) -> bytes:
    """Lines of a batch; each has the number of its line for an id. Raises InvalidRequest."""
    written = []
    for number, line in enumerate(lines, before + 1):
        try:
            fields = _decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"Request {number} is no JSON object: {error}.", param=f"line {number}") from error
        body = fields["body"] if isinstance(fields.get("body"), dict) and "url" in fields else fields
        if fields is not body and fields["url"] != path:
            message = f"Request {number} is for {str(fields['url'])[:100]!r}, and 'path' is {path}."
            raise InvalidRequest(message, param=f"line {number}")
        written.append(_encode({"custom_id": f"warm-{number}", "method": "POST", "url": path, "body": body}))
    return b"\n".join(written) + b"\n"
