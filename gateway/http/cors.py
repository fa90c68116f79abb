"""Cross-origin requests (WHATWG Fetch, section 3.2), for apps that run in a browser and call the gateway from there."""

from collections.abc import Awaitable, Callable, Collection

from aiohttp import web
from aiohttp.typedefs import Middleware

_ANY = "*"
_PREFLIGHT_SECONDS = "600"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def allowed_origin(request: web.BaseRequest, origins: Collection[str]) -> str | None:
    """The value of Access-Control-Allow-Origin for this request; None if it comes from no other, allowed origin."""
    origin = request.headers.get("Origin")
    if origin is None:
        return None
    return _ANY if _ANY in origins else origin if origin in origins else None


def answering_preflights(origins: Collection[str]) -> Middleware:
    """A middleware that answers a browser's question whether it may send a request from one of `origins`."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Method")
        if request.method != "OPTIONS" or asked is None or allowed_origin(request, origins) is None:
            return await handler(request)
        headers = {"Access-Control-Allow-Methods": asked, "Access-Control-Max-Age": _PREFLIGHT_SECONDS}
        if names := request.headers.get("Access-Control-Request-Headers"):
            headers["Access-Control-Allow-Headers"] = names
        return web.Response(status=204, headers=headers)

    return middleware


def marking_answers(origins: Collection[str]) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal of the application that lets pages of `origins` read every response, with all of its headers.

    Other pages read none, whatever an upstream says.
    """

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        if (origin := allowed_origin(request, origins)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _ANY
            response.headers.add("Vary", "Origin")
        elif "Origin" in request.headers:
            response.headers.popall("Access-Control-Allow-Origin", None)

    return mark
