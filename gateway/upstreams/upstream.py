"""An OpenAI-compatible server, reached over HTTP. Exceptions of the HTTP client become the gateway's own here."""

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from gateway.errors import UpstreamDisconnected, UpstreamTimeout, UpstreamUnreachable
from gateway.settings.settings import TimeoutSettings
from gateway.tenants.credentials import NAMESPACE_HEADER
from gateway.upstreams.connection import ConnectionPool, Exchange, Origin, request_head

# RFC 9110, section 7.6.1, and what this hop decides for itself.
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Says `batch` where a request may wait for others.
PRIORITY_HEADER = "x-keepgate-priority"
# Whether the prompt is likely to be the prefix of another one.
REUSE_HEADER = "x-keepgate-reuse"

# A body arrives here decompressed, so its content encoding no longer applies.
_DROPPED_REQUEST_HEADERS = HOP_BY_HOP | {
    "host",
    "content-length",
    "content-encoding",
    "accept-encoding",
    "expect",
    "x-keepgate-admin-key",
    PRIORITY_HEADER,
    # Set by the gateway alone: a client that set it could read another tenant's KV blocks.
    NAMESPACE_HEADER,
}
_DROPPED_RESPONSE_HEADERS = HOP_BY_HOP | {"content-length", "content-encoding", "date", "server"}

# A server that was closing a kept-alive connection resets it within a round trip. A later reset means that it failed on
# the request, and would fail again.
_STALE_SECONDS = 0.5

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One form in which a request can be put: a path and a body, and the family of what answers it.

    `needs` names what an upstream must have for it ("" for nothing), and `lacking` tells from the status and the body
    of an error whether it has not. `own` are headers that replace the client's, `dropped` those that are not sent, in
    lower case. `mark` names a field in the body that is for the upstream's prompt cache and that it may refuse, if any.
    """

    path: str
    body: bytes | None
    family: str = ""
    needs: str = ""
    lacking: Callable[[int, bytes], bool] | None = None
    own: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    dropped: frozenset[str] = frozenset()
    mark: str = ""


def end_to_end(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    """The headers to forward: without `dropped` and without those that Connection names."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in dropped and name.lower() not in named:
            kept.add(name, value)
    return kept


class UpstreamResponse:
    """An answer whose status and headers have arrived; the body follows. Use as a context manager."""

    def __init__(self, upstream: "Upstream", exchange: Exchange, idle: float) -> None:
        self.upstream = upstream
        self._exchange = exchange
        self._idle = idle
        self.status = exchange.status
        self.headers = end_to_end(exchange.headers, _DROPPED_RESPONSE_HEADERS)
        self.attempt: Attempt | None = None
        """Which form of the request it answers, if there were several."""
        self._peeked: bytes | None = None

    def __enter__(self) -> "UpstreamResponse":
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange.end()
        self.upstream.in_flight -= 1

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamDisconnected when it breaks, UpstreamTimeout when nothing comes."""
        if self._peeked is not None:
            yield self._peeked
            return
        name = self.upstream.name
        try:
            while chunk := await self._exchange.chunk(self._idle):
                yield chunk
        except TimeoutError as error:
            raise UpstreamTimeout(f"{name} sent nothing for {self._idle:g} s within its answer.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamDisconnected(f"{name} broke the connection within its answer.") from error

    async def peek(self, limit: int) -> bytes:
        """The whole body, which `chunks` gives once more. Raises what `body` raises."""
        self._peeked = await self.body(limit)
        return self._peeked

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises what `chunks` raises, and UpstreamDisconnected if it is over `limit` bytes."""
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > limit:
                raise UpstreamDisconnected(f"{self.upstream.name} sent more than {limit} bytes.")
        return bytes(body)


class Upstream:
    """One base URL. `models` are the names it lists, None while unknown; `in_flight` counts open requests.

    `label` names it in metrics.
    """

    def __init__(self, url: str, connections: ConnectionPool, timeouts: TimeoutSettings, label: str = "") -> None:
        base = URL(url)
        # "http://host:8000" and "http://host:8000/v1" are both what people paste.
        path = "/v1" if base.path in ("", "/") else base.raw_path.rstrip("/")
        self._path = path
        self._origin = Origin(base)
        self._connections = connections
        self._timeouts = timeouts
        self.name = f"upstream {base.host}:{base.port}"
        self.url = url
        self.label = label or url
        self.models: frozenset[str] | None = None
        self.reachable = False
        self.in_flight = 0
        self.probed = False
        self.has: set[str] = set()
        """The endpoints, of those that are probed, that it has shown to have."""
        self.lacks: set[str] = set()
        """What it has shown not to have, by the names of `Attempt.needs`."""

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        own: Mapping[str, str] = NO_HEADERS,
        dropped: frozenset[str] = frozenset(),
    ) -> UpstreamResponse:
        """The answer to a request, once it has begun. `path` may carry a query; below /v1 it is relative to the base
        URL, and else to the base URL without its /v1.

        `headers` are the client's, of which those in `dropped` are not sent; those in `own` replace them.

        Raises UpstreamUnreachable if there is no connection, UpstreamDisconnected if it ends before an answer begins,
        and UpstreamTimeout if none begins in time.
        """
        sent = end_to_end(headers, _DROPPED_REQUEST_HEADERS | dropped)
        sent.update(own)
        head = request_head(method, self._target(path), self._origin.host, sent, body)
        self.in_flight += 1
        try:
            exchange = await self._begin(head, body, without_body=method == "HEAD")
        except BaseException:
            self.in_flight -= 1
            raise
        self.reachable = True
        if 200 <= exchange.status <= 599:
            return UpstreamResponse(self, exchange, self._timeouts.idle)
        status = exchange.status
        exchange.end()
        self.in_flight -= 1
        raise UpstreamDisconnected(
            f"{self.name} answered with status {status}, which is no final HTTP status (200 to 599)."
        )

    def _target(self, path: str) -> str:
        if path.startswith("/v1/"):
            return self._path + path.removeprefix("/v1")
        return self._path.removesuffix("/v1") + path

    async def _begin(self, head: bytes, body: bytes | None, *, without_body: bool) -> Exchange:
        try:
            try:
                return await self._exchange(head, body, without_body)
            except _StaleConnection:
                return await self._exchange(head, body, without_body, new=True)
        except aiohttp.ConnectionTimeoutError as error:
            self._lost()
            raise UpstreamUnreachable(f"{self.name}: no connection in {self._timeouts.connect:g} s.") from error
        except TimeoutError as error:
            raise UpstreamTimeout(f"{self.name} did not begin to answer in {self._timeouts.first_byte:g} s.") from error
        except aiohttp.ClientConnectorError as error:
            self._lost()
            raise UpstreamUnreachable(f"{self.name} cannot be reached: {_reason(error)}.") from error
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            # It has the request and may be computing: no other upstream is asked.
            raise UpstreamDisconnected(f"{self.name} gave no answer: {_reason(error)}.") from error

    def _lost(self) -> None:
        """It may come back as another version, and is asked again what it has. Until then keys stay what they were."""
        self.reachable = self.probed = False

    async def _exchange(self, head: bytes, body: bytes | None, without_body: bool, *, new: bool = False) -> Exchange:
        connection, reused = await self._connections.connection(self._origin, new=new)
        exchange = Exchange(connection)
        began = time.monotonic()
        try:
            await exchange.begin(head, body, without_body=without_body, read_timeout=self._timeouts.first_byte)
        except BaseException as error:
            exchange.end()
            # On a new connection, or after a while, the server has read the request and may be computing.
            is_early = time.monotonic() - began < _STALE_SECONDS
            if reused and is_early and isinstance(error, aiohttp.ClientConnectionError | ConnectionError):
                raise _StaleConnection from error
            raise
        return exchange


class _StaleConnection(Exception):
    """A kept-alive connection ended before an answer: most likely the server was closing it and read nothing."""


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error.strerror or error.os_error).lower()
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, HttpProcessingError):
        return "what it said cannot be read as HTTP"
    return type(error).__name__
