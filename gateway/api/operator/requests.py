"""The requests that ended a moment ago, for the operator."""

from typing import Literal

import msgspec
from aiohttp import web

from cache.errors import StoreUnavailable
from gateway.api.access import require_operator
from gateway.api.app_keys import RECENT_REQUESTS
from gateway.errors import CacheUnavailable, InvalidRequest
from gateway.telemetry.recent_requests import RecentRequest

_FILTERS = ("model", "key", "team", "namespace", "cache", "layer", "upstream")
_DEFAULT_LIMIT, _MOST = 50, 500
_encode = msgspec.json.Encoder().encode


class RecentRequestList(msgspec.Struct, kw_only=True):
    """The newest first."""

    object: Literal["list"] = "list"
    data: list[RecentRequest]


async def list_requests(request: web.Request) -> web.Response:
    """GET /v1/requests: what became of the last requests; no text of them is kept."""
    require_operator(request)
    query = request.query
    for field in query:
        if field not in (*_FILTERS, "limit"):
            raise InvalidRequest(
                f"'{field}' is no parameter of this list, which has {', '.join(_FILTERS)} and limit.", param=field
            )
    limit = query.get("limit", str(_DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST):
        raise InvalidRequest(f"'limit' must be a number from 1 to {_MOST}.", param="limit")
    try:
        found = await request.app[RECENT_REQUESTS].latest()
    except StoreUnavailable as error:
        raise CacheUnavailable(f"The shared store does not answer: {error}.") from error
    wanted = {name: query[name] for name in _FILTERS if name in query}
    data = [each for each in found if all(getattr(each, name) == value for name, value in wanted.items())]
    return web.Response(body=_encode(RecentRequestList(data=data[: int(limit)])), content_type="application/json")
