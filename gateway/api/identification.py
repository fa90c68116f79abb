"""Every request has a caller before a handler sees it, but for the few paths that need none."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import GatewayError
from gateway.tenants.caller import CALLER, Caller
from gateway.tenants.callers import Callers

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# What says nothing of any tenant, and metrics, which name teams with what they cost.
_OPEN = frozenset({"/", "/dashboard", "/health", "/ready", "/metrics", "/openapi.json"})
# Its files have no data.
_DASHBOARD = "/dashboard/"
# What an operator uses, whose key is no virtual key; handlers that also serve tenants ask for the caller themselves.
_OPERATORS = frozenset({"cache", "keys", "teams", "budgets", "costs", "routing", "requests", "engines"})
_RELAY = "/v1/{rest}"


def identifying(callers: Callers) -> Middleware:
    """A middleware that finds the caller of each request. Raises what `Callers.identify` raises."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _OPEN and not request.path.startswith(_DASHBOARD) and CALLER not in request:
            if _first_part(request.path) in _OPERATORS and not _is_relayed(request):
                await _identify_tenant(request, callers)
            else:
                request[CALLER] = await callers.identify(request.headers)
        return await handler(request)

    return middleware


def _first_part(path: str) -> str:
    """The first part of a path below /v1."""
    return path.removeprefix("/v1/").partition("/")[0] if path.startswith("/v1/") else ""


def _is_relayed(request: web.Request) -> bool:
    """Whether there is no route of the gateway's own, so that an upstream gets the request."""
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical == _RELAY


async def _identify_tenant(request: web.Request, callers: Callers) -> None:
    try:
        request[CALLER] = await callers.identify(request.headers)
    except GatewayError:
        return  # the operator, whom the handler asks for the admin key


def caller_of(request: web.Request) -> Caller | None:
    """The caller; None for who sends no virtual key where one is needed, such as an operator."""
    return request.get(CALLER)
