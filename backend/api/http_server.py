"""aiohttp's server, changed so that malformed HTTP gets an error in OpenAI's form and is never quoted or logged."""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import http_exceptions, web
from aiohttp.web_protocol import _ErrInfo

from backend.errors import GenerationFailed, InvalidRequest, MethodNotAllowed, NotFound, QueueFull, RequestError

logger = logging.getLogger(__name__)

IDLE_CONNECTION_SECONDS = 75.0
"""A connection without a complete request head for so long is closed."""
UNEXPECTED = GenerationFailed("unexpected failure; the server's log has the cause")

# The client's own faults: they are answered where they arise and not logged.
_CLIENT_ERRORS = (web.RequestPayloadError, http_exceptions.HttpProcessingError, ConnectionError)


@asynccontextmanager
async def listening(app: web.Application, sock: socket.socket, shutdown_timeout: float) -> AsyncIterator[None]:
    """Serves the application on a bound socket; at the end handlers have ``shutdown_timeout`` seconds to finish."""
    application = web.AppRunner(app)
    await application.setup()
    try:
        assert application.server is not None  # noqa: S101 - setup() has made it
        runner = web.ServerRunner(_HttpServer(application.server), shutdown_timeout=shutdown_timeout)
        await runner.setup()
        try:
            await web.SockSite(runner, sock).start()
            yield
        finally:
            await runner.cleanup()
    finally:
        await application.cleanup()


def error_response(error: RequestError) -> web.Response:
    """An error in OpenAI's form."""
    response = web.Response(
        body=msgspec.json.encode(error.response()), status=error.status, content_type="application/json"
    )
    if isinstance(error, QueueFull):
        response.headers["Retry-After"] = str(error.retry_after)
    return response


def request_error_of(error: web.HTTPException, request: web.BaseRequest) -> RequestError:
    """The `RequestError` for an error that aiohttp raised."""
    if error.status == NotFound.status:
        return NotFound("no such path; see GET /v1/models and POST /v1/chat/completions")
    if error.status == MethodNotAllowed.status:
        return MethodNotAllowed(f"{request.method} is not offered on this path")
    return InvalidRequest(f"bad request: {error.reason}")


class _HttpConnection(web.RequestHandler):
    """A connection that does not quote unreadable input; aiohttp's own does, to the client and in the log."""

    __slots__ = ()

    def data_received(self, data: bytes) -> None:
        """Parses received data. If a body breaks off, fails the handler that reads it, which aiohttp omits."""
        super().data_received(data)
        request = self._current_request
        if request is None or request.content.is_eof() or not self._messages:
            return
        if isinstance(self._messages[-1][0], _ErrInfo):  # the parser has given up
            request.content.set_exception(web.RequestPayloadError())

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to an error outside of the handlers; the connection closes after it.

        Raises:
            ConnectionError: another response has begun.
        """
        if status >= 500:
            self.log_exception("Error handling request", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun")
        response = error_response(_unreadable(exc) if status < 500 else UNEXPECTED)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs a failure of the server by type and traceback only: its message may quote what a client sent."""
        error = kw.get("exc_info")
        if isinstance(error, BaseException) and not isinstance(error, _CLIENT_ERRORS):
            frames = "".join(traceback.format_tb(error.__traceback__))
            logger.error("a connection failed: %s\n%s", type(error).__name__, frames)


class _HttpServer(web.Server):
    """The application's server, with `_HttpConnection` for its connections."""

    def __init__(self, application: web.Server) -> None:
        super().__init__(
            _with_error_form(application.request_handler),
            request_factory=application.request_factory,
            handler_cancellation=True,
        )

    def __call__(self) -> _HttpConnection:
        # aiohttp's types do not allow None, which disables the access log.
        options: dict[str, Any] = {"access_log": None, "keepalive_timeout": IDLE_CONNECTION_SECONDS}
        return _HttpConnection(self, loop=asyncio.get_running_loop(), **options)


def _with_error_form(handle: Any) -> Any:
    """Wraps aiohttp's request handler: it refuses some requests (for their Expect header) before any middleware."""

    async def handle_with_error_form(request: web.BaseRequest) -> web.StreamResponse:
        try:
            response: web.StreamResponse = await handle(request)
        except web.HTTPException as error:
            return error_response(request_error_of(error, request))
        return response

    return handle_with_error_form


def _unreadable(error: BaseException | None) -> InvalidRequest:
    if isinstance(error, http_exceptions.LineTooLong):
        reason = "a line of its head is too long"
    elif isinstance(error, http_exceptions.BadStatusLine | http_exceptions.InvalidURLError):
        reason = "its first line is no request line"
    elif isinstance(error, http_exceptions.PayloadEncodingError):
        reason = "its body does not fit its Content-Encoding or Transfer-Encoding"
    else:
        reason = "its head or its framing cannot be read"
    return InvalidRequest(f"this is not an HTTP request: {reason}")
