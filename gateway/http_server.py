"""aiohttp's server, saying what is wrong with bytes that are not HTTP in the form of all other errors."""

import asyncio
import logging
import traceback
from typing import Any

from aiohttp import web

from gateway.errors import GatewayError, InternalError, InvalidRequest

log = logging.getLogger(__name__)


class HttpConnection(web.RequestHandler):
    """aiohttp's connection, which by itself would quote what it cannot read, to the client and in the log."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to what no handler has answered; the connection ends with it.

        Raises ConnectionError when another response has begun.
        """
        if status >= 500:
            frames = "".join(traceback.format_tb(exc.__traceback__)) if exc is not None else ""
            log.error("a connection failed: %s\n%s", type(exc).__name__, frames)
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun")
        if status >= 500:
            error: GatewayError = InternalError("The gateway failed on this request. Its log says where.")
        else:
            reason = (message or "").partition("\n")[0].rstrip(":. ") or "it cannot be read"
            error = InvalidRequest(f"This is not an HTTP request: {reason}.")
            error.status = status
        response = error.response()
        response.force_close()
        return response


class HttpServer(web.Server):
    """Serves what an application's own server would serve, on connections of the kind above."""

    def __init__(self, application: web.Server, **options: Any) -> None:
        super().__init__(application.request_handler, request_factory=application.request_factory, **options)
        self._options = {name: value for name, value in options.items() if name != "handler_cancellation"}

    def __call__(self) -> HttpConnection:
        return HttpConnection(self, loop=asyncio.get_running_loop(), **self._options)
