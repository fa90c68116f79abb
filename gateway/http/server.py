"""aiohttp's server, with OpenAI-form errors for bytes that are not HTTP."""

import asyncio
import logging
import socket
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import http_exceptions, web
from aiohttp.http import RawRequestMessage
from aiohttp.web_protocol import _ErrInfo

from gateway import metrics
from gateway.errors import GatewayError, InternalError, InvalidRequest, TooBusy
from gateway.http.hosts import HostCheck
from gateway.http.request_head import fault_of_head

log = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

# Answered where they arose, or no client is left to answer: not logged.
_CLIENT_ERRORS = (web.RequestPayloadError, http_exceptions.HttpProcessingError, ConnectionError)
# Connections over the limit that are told so; further ones are cut.
_MAX_REFUSED_CONNECTIONS = 64
_REFUSED_SECONDS = 5.0


class HttpConnection(web.RequestHandler):
    """aiohttp's connection. Its own errors would quote the request, to the client and in the log."""

    __slots__ = ("_is_refused", "_server", "_timeout")

    def __init__(self, server: "HttpServer", timeout: float, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._server = server
        self._timeout = timeout
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the kernel end the connection of a client that acknowledges nothing for `timeout` seconds."""
        super().connection_made(transport)
        if (over := self._server.connections_over_limit) > 0:
            self._is_refused = True
            self._loop.call_later(0 if over > _MAX_REFUSED_CONNECTIONS else _REFUSED_SECONDS, self.force_close)
        connection = transport.get_extra_info("socket")
        if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self._timeout * 1000))

    def data_received(self, data: bytes) -> None:
        """Parse what arrived. After a framing error the reader of the body gets an exception, which aiohttp omits."""
        known = len(self._messages)
        super().data_received(data)
        for place in range(known, len(self._messages)):
            message, payload = self._messages[place]
            if isinstance(message, _ErrInfo):
                continue
            if "Content-Encoding" in message.headers:
                # A body that was refused is not read to its end: unpacked it may be a thousand times as long.
                self._lingering_time = 0.0
            if self._is_refused:
                error: GatewayError | None = TooBusy("The gateway has as many connections as it takes; try again.")
            else:
                error = self._server.refusal(message)
            if error is not None:
                self._messages[place] = (_ErrInfo(error.status, error, error.message), payload)
        waiting = self._current_request
        if waiting is None or waiting.content.is_eof() or not self._messages:
            return
        if isinstance(self._messages[-1][0], _ErrInfo):  # the parser has given up
            waiting.content.set_exception(web.RequestPayloadError("it does not fit its own framing"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The response to a request that no handler has answered; the connection ends with it.

        Raises ConnectionError when another response has begun.
        """
        is_fault = status >= 500 and not isinstance(exc, GatewayError)
        if is_fault:
            self.log_exception("", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("a response has begun")
        if isinstance(exc, GatewayError):
            error = exc
            metrics.errors.labels(error.label).inc()
        elif is_fault:
            error = InternalError("The gateway failed on this request. Its log says where.")
        else:
            error = InvalidRequest(f"This is not an HTTP request: {_reason(exc)}.")
            error.status = status
        response = error.response()
        response.force_close()
        return response

    def log_exception(self, *_: Any, **details: Any) -> None:
        """Log a failure by type and place: its message may quote a client. Faults of a client are not logged."""
        fault = details.get("exc_info")
        if isinstance(fault, BaseException) and not isinstance(fault, _CLIENT_ERRORS):
            frames = "".join(traceback.format_tb(fault.__traceback__))
            log.error("a connection failed: %s\n%s", type(fault).__name__, frames)


def _with_error_body(handle: Handler) -> Handler:
    """Requests that aiohttp refuses before any middleware (for their Expect header) get the same error form."""

    async def handle_all(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await handle(request)
        except web.HTTPException as refusal:
            error = InvalidRequest(f"{refusal.reason}.")
            error.status = refusal.status
            return error.response()

    return handle_all


def _reason(fault: BaseException | None) -> str:
    """The reason without aiohttp's message, which quotes the client."""
    if isinstance(fault, http_exceptions.LineTooLong):
        return "a line of its head is too long"
    if isinstance(fault, http_exceptions.BadStatusLine | http_exceptions.InvalidURLError):
        return "its first line is no request line"
    return "its head or its framing cannot be read"


_LAST_WORDS_SECONDS = 1.0


class HttpServer(web.Server):
    """Serves an application on connections of this class. Another one may take its place while connections are open."""

    def __init__(self, timeout: float, **options: Any) -> None:
        super().__init__(self._handle, request_factory=self._make, **options)
        self._timeout = timeout
        self._options = {name: value for name, value in options.items() if name != "handler_cancellation"}
        self._drained_at: float | None = None
        self.interrupt: Callable[[], None] = lambda: None
        """Called when the time of a drain is over: what is under way has a second to tell its client why it ends."""
        self._hosts: HostCheck | None = None
        self._max_connections: int | None = None

    async def drain(self, seconds: float) -> None:
        """End connections that are idle, and the others after the requests under way, at the latest in `seconds`."""
        if self._drained_at is None:
            self._drained_at = asyncio.get_running_loop().time() + seconds
            await asyncio.sleep(0)  # requests that have arrived begin
            self.pre_shutdown()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  # aiohttp's method
        """Wait until the drained connections have ended."""
        if self._drained_at is None:
            await super().shutdown(timeout)
            return
        loop = asyncio.get_running_loop()
        interrupting = loop.call_at(self._drained_at, self.interrupt)
        try:
            await super().shutdown(max(0.0, self._drained_at - loop.time()) + _LAST_WORDS_SECONDS)
        finally:
            interrupting.cancel()

    def use(self, application: web.Server, wrap: Callable[[Handler], Handler]) -> None:
        """Answer further requests by this application; `wrap` puts a handler in front of its own."""
        self._current_handler = wrap(_with_error_body(application.request_handler))
        self._current_factory = application.request_factory

    def restrict(self, hosts: HostCheck | None, max_connections: int | None) -> None:
        """Refuse requests that `hosts` refuses, and those on connections over the limit; None for none."""
        self._hosts = hosts
        self._max_connections = max_connections

    @property
    def connections_over_limit(self) -> int:
        """Open connections beyond the limit; 0 or less if there are none."""
        return 0 if self._max_connections is None else len(self._connections) - self._max_connections

    def refusal(self, message: RawRequestMessage) -> GatewayError | None:
        """Why a request with this head gets to no handler, if so."""
        error = fault_of_head(message)
        return error if error is not None or self._hosts is None else self._hosts.refusal(message.headers)

    def _handle(self, request: web.BaseRequest) -> Awaitable[web.StreamResponse]:
        return self._current_handler(request)

    def _make(self, *parts: Any) -> web.BaseRequest:
        return self._current_factory(*parts)

    def __call__(self) -> HttpConnection:
        return HttpConnection(self, self._timeout, **self._options)
