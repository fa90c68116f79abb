"""Many prompts in one request: POST /v1/generate/batch."""

import asyncio
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from gateway.api.app_keys import SETTINGS
from gateway.errors import InvalidRequest
from gateway.http.body import read_body
from gateway.http.json_object import decode_object
from gateway.surfaces.generate import PATH, optimization_of
from gateway.surfaces.surface import Json
from gateway.upstreams.upstream import HOP_BY_HOP, end_to_end

_MAX_ITEMS = 4096
_AT_ONCE = 64
# Of the request as a whole, whose body arrives here decompressed.
_DROPPED = HOP_BY_HOP | {"host", "content-length", "content-type", "content-encoding", "accept-encoding", "expect"}

_encode = msgspec.json.Encoder().encode


async def generate_batch(request: web.Request) -> web.Response:
    """POST /v1/generate/batch: `prompts`, or `requests` with fields of their own; the other fields are for all.

    Each item is a request to POST /v1/generate of this gateway, answered apart from the others. With `optimization:
    none` they are answered one after the other, each computed by itself.
    """
    settings = request.app[SETTINGS]
    fields = decode_object(await read_body(request, settings.max_body, settings.timeouts.client))
    items = _items(fields)
    optimization = optimization_of(fields)
    headers = end_to_end(request.headers, _DROPPED)
    slots = asyncio.Semaphore(1 if optimization == "none" else _AT_ONCE)
    began = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=None, sock_read=settings.timeouts.first_byte + settings.timeouts.idle)
    connector = aiohttp.TCPConnector(limit=_AT_ONCE)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session,
        asyncio.TaskGroup() as group,
    ):
        url = _own_url(request)
        tasks = [group.create_task(_answer(session, url, slots, item)) for item in items]
    results = [{"index": index, **task.result()} for index, task in enumerate(tasks)]
    return web.Response(
        body=_encode(
            {
                "object": "generation.batch",
                "optimization": optimization,
                "results": results,
                "totals": _totals(results, time.monotonic() - began),
            }
        ),
        content_type="application/json",
    )


def _items(fields: Json) -> list[Json]:
    """The body of each item. Raises InvalidRequest, naming the field."""
    if fields.get("stream") is not None:
        raise InvalidRequest("'stream' is not possible for a batch.", param="stream")
    common = {name: value for name, value in fields.items() if name not in ("prompts", "requests")}
    prompts, requests = fields.get("prompts"), fields.get("requests")
    if (prompts is None) == (requests is None):
        raise InvalidRequest("A batch has either 'prompts' or 'requests'.", param="prompts")
    name, given = ("prompts", prompts) if requests is None else ("requests", requests)
    if not isinstance(given, list) or not 1 <= len(given) <= _MAX_ITEMS:
        raise InvalidRequest(f"'{name}' must be a list of 1 to {_MAX_ITEMS} items.", param=name)
    read = _prompt if requests is None else _request
    return [{**common, **read(item, f"{name}[{index}]")} for index, item in enumerate(given)]


def _prompt(item: Any, name: str) -> Json:
    if not isinstance(item, str):
        raise InvalidRequest(f"'{name}' must be text.", param=name)
    return {"prompt": item}


def _request(item: Any, name: str) -> Json:
    if not isinstance(item, dict):
        raise InvalidRequest(f'\'{name}\' must be an object such as {{"prompt": "..."}}.', param=name)
    for field in ("stream", "optimization"):
        if item.get(field) is not None:
            raise InvalidRequest(f"'{name}.{field}' cannot be: it is for the whole batch.", param=name)
    return item


async def _answer(session: aiohttp.ClientSession, url: str, slots: asyncio.Semaphore, item: Json) -> Json:
    """What became of one item."""
    async with slots:
        began = time.monotonic()
        try:
            # To itself, whose certificate is for the name that clients use, not for this address.
            sent = session.post(url, data=_encode(item), headers={"Content-Type": "application/json"}, ssl=False)
            async with sent as response:
                status, headers = response.status, response.headers
                answer = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, UnicodeDecodeError) as fault:
            error = {"message": f"The gateway gave no answer: {type(fault).__name__}.", "type": "server_error"}
            return {"status": 502, "error": error, "seconds": time.monotonic() - began}
    result: Json = {"status": status, "seconds": time.monotonic() - began}
    is_shared = "; collapsed" in headers.get("Cache-Status", "")
    outcome = "shared" if is_shared else headers.get("x-keepgate-cache")
    cache = {"outcome": outcome, "layer": headers.get("x-keepgate-layer")}
    if status != 200:
        return {**result, "error": answer.get("error", answer) if isinstance(answer, dict) else answer}
    return {**result, "cache": cache, "generation": answer}


def _totals(results: list[dict[str, Any]], seconds: float) -> Json:
    """Counts of the batch, and its throughput. `computed_tokens` are the completion tokens of answers that came neither
    from the cache nor from a call that another item made.
    """
    answered = [result for result in results if "generation" in result]
    outcomes = Counter(result["cache"]["outcome"] for result in answered)
    computed = [result for result in answered if result["cache"]["outcome"] not in ("hit", "shared")]
    completion = _tokens(answered, "completion_tokens")
    return {
        "items": len(results),
        "succeeded": len(answered),
        "failed": len(results) - len(answered),
        "cache_hits": outcomes["hit"],
        "shared": outcomes["shared"],
        "prompt_tokens": _tokens(answered, "prompt_tokens"),
        "completion_tokens": completion,
        "computed_tokens": _tokens(computed, "completion_tokens"),
        "seconds": seconds,
        "items_per_second": len(results) / seconds,
        "tokens_per_second": completion / seconds,
    }


def _tokens(results: list[dict[str, Any]], name: str) -> int:
    return sum(result["generation"]["usage"][name] for result in results)


def _own_url(request: web.Request) -> str:
    """The address at which this request arrived: that of this gateway, whatever stands in front of it."""
    name = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if name is None:
        raise ConnectionResetError("the client has gone")
    host, port = name[:2]
    return f"{request.scheme}://[{host}]:{port}{PATH}" if ":" in host else f"{request.scheme}://{host}:{port}{PATH}"
