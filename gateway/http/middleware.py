"""Turns every exception of a handler into an error response."""

import logging
import traceback
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway import metrics
from gateway.errors import GatewayError, InternalError, InvalidRequest, MethodNotAllowed, NotFound

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STARTED = web.RequestKey("started", bool)


async def mark_started(request: web.Request, _: web.StreamResponse) -> None:
    request[_STARTED] = True


def answering_errors(render: Callable[[web.Request, GatewayError], web.Response]) -> Middleware:
    """A middleware that answers errors; `render` makes the response in the form that belongs to its path."""

    @web.middleware
    async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await _answer(request, handler, render)

    return error_middleware


async def _answer(
    request: web.Request, handler: Handler, render: Callable[[web.Request, GatewayError], web.Response]
) -> web.StreamResponse:
    """The handler's response, or an error's. One that has started is cut, so that no client takes it for complete."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        hint = (
            "" if request.path.startswith("/v1/") else " OpenAI's endpoints are under /v1: does the base URL end in it?"
        )
        error: GatewayError = NotFound(f"There is no {request.method} {request.path}.{hint}")
    except web.HTTPMethodNotAllowed as refusal:
        error = MethodNotAllowed(f"{request.path} takes {', '.join(sorted(refusal.allowed_methods))}.")
    except web.HTTPException as refusal:
        error = InvalidRequest(refusal.reason)
        error.status = refusal.status
    except GatewayError as failure:
        error = failure
    except ConnectionError:
        # Upstreams and stores have errors of their own: the client has disconnected.
        return web.Response()
    except Exception as fault:  # noqa: BLE001  # the last resort; it is logged and answered
        # Without the message and the path: both may contain a tenant's text.
        frames = "".join(traceback.format_tb(fault.__traceback__))
        log.error("a request failed: %s\n%s", type(fault).__name__, frames)
        error = InternalError("The gateway failed on this request. Its log says where.")
    metrics.errors.labels(error.label).inc()
    if _STARTED in request and request.transport is not None:
        request.transport.abort()  # the returned response is not sent
    return render(request, error)
