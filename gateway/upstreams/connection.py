"""A request and its answer on one HTTP/1.1 connection. The only place that knows aiohttp's connections and parser.

`aiohttp.ClientSession` would look after redirects, cookies, proxies and defaults, all of which a gateway has to leave
alone, and take longer for that than the exchange itself takes: docs/decisions/009-what-a-miss-costs.md has the figures.
"""

import asyncio
import errno
import ssl
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http import RawResponseMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDictProxy
from yarl import URL

from gateway.http.tls import fault_of_certificate

_KEEPALIVE_EXPIRY = 30.0
_BUFFER_BYTES = 2**18
_INFORMATIONAL = range(100, 200)
_SWITCHING_PROTOCOLS = 101
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Origin:
    """A scheme, host and port, as the pool of connections knows it. `tls` says what is trusted of it, None for the
    system's certificates.
    """

    def __init__(self, url: URL, tls: ssl.SSLContext | None = None) -> None:
        trusted = True if tls is None else tls
        self.request = aiohttp.ClientRequest("GET", url, loop=asyncio.get_running_loop(), ssl=trusted)
        self.host = url.host_port_subcomponent or ""


class ConnectionPool:
    """Connections to all origins, kept alive between exchanges. `connect` seconds are given to open one."""

    def __init__(self, connector: aiohttp.BaseConnector, connect: float) -> None:
        self._connector = connector
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect)
        self._used: weakref.WeakSet[ResponseHandler] = weakref.WeakSet()

    async def connection(self, origin: Origin, *, new: bool = False) -> tuple[Connection, bool]:
        """One that is free or new, and whether it has been used before; with `new`, those that have been are closed.

        Raises aiohttp.ClientConnectorError, and aiohttp.ConnectionTimeoutError when there is none in time.
        """
        while True:
            try:
                connection = await self._connector.connect(origin.request, [], self._timeout)
            except TimeoutError as error:
                raise aiohttp.ConnectionTimeoutError("no connection in time") from error
            except aiohttp.ClientConnectorCertificateError as error:
                raise aiohttp.ClientConnectorError(origin.request.connection_key, _named(error)) from error
            protocol = _protocol(connection)
            reused = protocol in self._used
            # Bytes that arrived without a request must not be taken for an answer.
            if not protocol.should_close and not (new and reused):
                self._used.add(protocol)
                return connection, reused
            connection.close()


class Exchange:
    """What has been sent on a connection, and what comes back.

    A read timeout applies to each chunk. It does not run while the reader is busy.
    """

    __slots__ = ("_connection", "_limit", "_loop", "_message", "_payload", "_protocol", "_timer", "_waiting_since")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._protocol = _protocol(connection)
        self._loop = asyncio.get_running_loop()
        self._limit = 0.0
        self._waiting_since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._message: RawResponseMessage | None = None
        self._payload: StreamReader | None = None

    @property
    def status(self) -> int:
        return self._begun().code

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return self._begun().headers

    async def begin(self, head: bytes, body: bytes | None, *, without_body: bool, read_timeout: float) -> None:
        """Send, and wait until the answer has begun; `without_body` is for answers that have none, to HEAD.

        Raises TimeoutError after `read_timeout` seconds, aiohttp.ClientError, and
        aiohttp.http_exceptions.HttpProcessingError for what is not HTTP.
        """
        self._protocol.set_response_params(
            skip_payload=without_body, read_until_eof=True, auto_decompress=True, read_bufsize=_BUFFER_BYTES
        )
        transport = self._connection.transport
        if transport is None:
            raise aiohttp.ServerDisconnectedError
        transport.write(head + body if body else head)
        self._limit = read_timeout
        self._start_timer()
        while True:
            message, payload = await self._protocol.read()
            if message.code not in _INFORMATIONAL or message.code == _SWITCHING_PROTOCOLS:
                break
        self._waiting_since = None
        self._message, self._payload = message, payload

    async def chunk(self, read_timeout: float) -> bytes:
        """The next bytes of the body, decompressed, as they arrive; empty at the end.

        Raises TimeoutError after `read_timeout` seconds without any, and ClientError when it breaks off.
        """
        assert self._payload is not None  # noqa: S101  # it has begun
        self._limit = read_timeout
        self._start_timer()
        chunk = await self._payload.readany()
        self._waiting_since = None
        return chunk

    def end(self) -> None:
        """Give the connection back if the exchange is over on both sides, and close it if it is not."""
        if self._timer is not None:
            self._timer.cancel()
        transport = self._connection.transport
        is_sent = transport is not None and transport.get_write_buffer_size() == 0
        if is_sent and self._payload is not None and self._payload.at_eof():
            self._connection.release()
            return
        if transport is not None and not is_sent:
            transport.abort()  # close() would go on sending to a peer that does not read
        self._connection.close()

    def _begun(self) -> RawResponseMessage:
        assert self._message is not None  # noqa: S101
        return self._message

    def _start_timer(self) -> None:
        now = self._waiting_since = self._loop.time()
        due = now + self._limit
        # One timer serves all chunks: when it fires it checks how long nothing has arrived.
        if self._timer is None or self._timer.when() > due:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        now = self._loop.time()
        due = (now if self._waiting_since is None else self._waiting_since) + self._limit
        if due > now:
            self._timer = self._loop.call_at(due, self._on_timer)
            return
        timeout = aiohttp.SocketTimeoutError("nothing came in time")
        self._protocol.set_exception(timeout)
        if self._payload is not None:
            self._payload.set_exception(timeout)


def _named(error: aiohttp.ClientConnectorCertificateError) -> OSError:
    """The error in words, as it is told for connections that fail in other ways."""
    fault = error.certificate_error
    if isinstance(fault, ssl.SSLCertVerificationError):
        return OSError(errno.EPROTO, fault_of_certificate(fault))
    return OSError(errno.EPROTO, "its certificate is not valid")


def _protocol(connection: Connection) -> ResponseHandler:
    protocol = connection.protocol
    assert protocol is not None  # noqa: S101  # it is neither released nor closed
    return protocol


def request_head(method: str, target: str, host: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The head of an HTTP/1.1 request, in which `headers` stand as they are. Raises ValueError for a line break."""
    if body is None and method in _WITH_BODY:
        body = b""  # strict servers want to hear its length all the same
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    lines += ("", "")
    head = "\r\n".join(lines)
    if head.count("\r") != len(lines) - 1 or head.count("\n") != len(lines) - 1:
        raise ValueError("a header holds a line break")
    return head.encode("utf-8", "surrogateescape")


@asynccontextmanager
async def open_connections(connect: float) -> AsyncIterator[ConnectionPool]:
    """The pool that all upstreams share."""
    async with aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_EXPIRY) as connector:
        yield ConnectionPool(connector, connect)
