"""An OpenAI-compatible server, reached over HTTP. The only place that knows aiohttp's client and its exceptions."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from gateway.errors import UpstreamCut, UpstreamTimeout, UpstreamUnreachable
from gateway.settings import TimeoutSettings

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
# A body arrives here unpacked, so what it was packed with is over as well.
_NOT_SENT_UPSTREAM = HOP_BY_HOP | {
    "host",
    "content-length",
    "content-encoding",
    "accept-encoding",
    "expect",
    "x-keepgate-admin-key",
}
_NOT_SENT_DOWN = HOP_BY_HOP | {"content-length", "content-encoding", "date", "server"}

USAGE_HEADER = "x-keepgate-usage"


def end_to_end(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    """The headers that travel on: without `dropped` and without those that Connection names."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in dropped and name.lower() not in named:
            kept.add(name, value)
    return kept


class UpstreamAnswer:
    """An answer that has begun: status and headers are there, the body follows."""

    def __init__(self, response: aiohttp.ClientResponse, name: str, idle: float) -> None:
        self._response = response
        self._name = name
        self._idle = idle
        self.status = response.status
        self.headers = end_to_end(response.headers, _NOT_SENT_DOWN)

    @property
    def is_event_stream(self) -> bool:
        return self._response.content_type == "text/event-stream"

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises UpstreamCut when it breaks, UpstreamTimeout when nothing comes."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._idle) as deadline:
                async for piece in self._response.content.iter_any():
                    deadline.reschedule(None)
                    yield piece
                    deadline.reschedule(loop.time() + self._idle)
        except TimeoutError as error:
            raise UpstreamTimeout(f"{self._name} sent nothing for {self._idle:g} s within its answer.") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamCut(f"{self._name} broke the connection within its answer.") from error

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises what `pieces` raises, and UpstreamCut when it is longer than `limit` bytes."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > limit:
                raise UpstreamCut(f"{self._name} sent more than {limit} bytes.")
        return bytes(body)


class Upstream:
    """One base URL. `models` are the names it lists, None while it has not said; `in_flight` counts open requests."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeouts: TimeoutSettings) -> None:
        base = URL(url)
        # "http://host:8000" and "http://host:8000/v1" are both what people paste.
        self._base = base.with_path("/v1") if base.path in ("", "/") else base.with_path(base.path.rstrip("/"))
        self._session = session
        self._timeouts = timeouts
        self.name = f"upstream {base.host}:{base.port}"
        self.models: frozenset[str] | None = None
        self.reachable = False
        self.in_flight = 0

    @asynccontextmanager
    async def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> AsyncIterator[UpstreamAnswer]:
        """Send a request; `path` begins with /v1 and may carry a query.

        Raises UpstreamUnreachable when there is no connection, UpstreamCut when it ends before an answer begins,
        UpstreamTimeout when none begins in time.
        """
        url = URL(str(self._base) + path.removeprefix("/v1"), encoded=True)
        sent = end_to_end(headers, _NOT_SENT_UPSTREAM)
        self.in_flight += 1
        try:
            response = await self._begin(method, url, sent, body)
            self.reachable = True
            try:
                if not 200 <= response.status <= 599:
                    raise UpstreamCut(f"{self.name} answered with status {response.status}, which no answer has.")
                yield UpstreamAnswer(response, self.name, self._timeouts.idle)
            finally:
                # After a whole body this is a no-op and the connection goes back to the pool.
                response.close()
        finally:
            self.in_flight -= 1

    async def _begin(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes | None
    ) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(self._timeouts.first_byte):
                reused: list[bool] = []
                try:
                    return await self._send(method, url, headers, body, reused)
                except aiohttp.ServerDisconnectedError:
                    # A kept-alive connection that the server was just closing, most likely: nobody has read the
                    # request. On a new connection somebody has, and may have begun to work.
                    if not reused:
                        raise
                    return await self._send(method, url, headers, body, [])
        except aiohttp.ConnectionTimeoutError as error:
            self.reachable = False
            raise UpstreamUnreachable(f"{self.name}: no connection in {self._timeouts.connect:g} s.") from error
        except TimeoutError as error:
            raise UpstreamTimeout(f"{self.name} did not begin to answer in {self._timeouts.first_byte:g} s.") from error
        except aiohttp.ClientConnectorError as error:
            self.reachable = False
            raise UpstreamUnreachable(f"{self.name} cannot be reached: {_reason(error)}.") from error
        except (aiohttp.ClientError, OSError) as error:
            # It has the request, and may have begun to work: another upstream is not asked the same.
            raise UpstreamCut(f"{self.name} gave no answer: {_reason(error)}.") from error

    async def _send(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes | None, reused: list[bool]
    ) -> aiohttp.ClientResponse:
        return await self._session.request(
            method, url, headers=headers, data=body, allow_redirects=False, trace_request_ctx=reused
        )


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return str(error.os_error.strerror or error.os_error).lower()
    return "it closed the connection" if isinstance(error, aiohttp.ServerDisconnectedError) else type(error).__name__


async def _note_reuse(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceConnectionReuseconnParams) -> None:
    context.trace_request_ctx.append(True)


@asynccontextmanager
async def open_session(timeouts: TimeoutSettings) -> AsyncIterator[aiohttp.ClientSession]:
    """The HTTP client that all upstreams share."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        trace_configs=[trace],
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=True,
        read_bufsize=2**18,
    ) as session:
        yield session
