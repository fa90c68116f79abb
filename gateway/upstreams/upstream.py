"""An OpenAI-compatible server, reached over HTTP. Exceptions of the HTTP client become the gateway's own here."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from gateway.costs.machine import Machine, MachineShare
from gateway.errors import DeadlineExceeded, TooManyRequests, UpstreamDisconnected, UpstreamTimeout, UpstreamUnreachable
from gateway.http.cache_control import TAGS_HEADER
from gateway.http.tls import upstream_context
from gateway.settings.settings import TimeoutSettings
from gateway.settings.upstreams import BreakerSettings, UpstreamSettings
from gateway.tenants.credentials import CREDENTIAL_HEADERS, NAMESPACE_HEADER
from gateway.upstreams.breaker import Breaker
from gateway.upstreams.connection import ConnectionPool, Exchange, Origin, request_head
from gateway.upstreams.identity import api_key, cache_salt, with_own_model
from gateway.upstreams.loaded import LoadedReport
from gateway.upstreams.slots import QueueFull, Slots

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
# The field of what an answer is predicted to be, in chat completions.
PREDICTION = "prediction"
# The seconds that are left for a whole answer.
TIMEOUT_HEADER = "x-request-timeout"

# A body arrives here decompressed, so its content encoding no longer applies.
_DROPPED_REQUEST_HEADERS = HOP_BY_HOP | {
    "host",
    "content-length",
    "content-encoding",
    "accept-encoding",
    "expect",
    "x-keepgate-admin-key",
    # Of the client's own connection and browser: not an upstream's to know, and not its to trust.
    "cookie",
    "forwarded",
    "origin",
    "referer",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-real-ip",
    PRIORITY_HEADER,
    TAGS_HEADER,
    TIMEOUT_HEADER,
    # Set by the gateway alone: a client that set it could read another tenant's KV blocks.
    NAMESPACE_HEADER,
}
_DROPPED_RESPONSE_HEADERS = HOP_BY_HOP | {"content-length", "content-encoding", "date", "server", "set-cookie"}

# A server that was closing a kept-alive connection resets it within a round trip. A later reset means that it failed on
# the request, and would fail again.
_STALE_SECONDS = 0.5

# Of the newest value, in the average of the seconds until an answer begins.
_NEWEST = 0.2

NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Attempt:
    """One form in which a request can be put: a path and a body, and the family of what answers it.

    `needs` names what an upstream must have for it ("" for nothing), and `lacking` tells from the status and the body
    of an error whether it has not. `own` are headers that replace the client's, `dropped` those that are not sent, in
    lower case. `marks` names fields in the body that change no answer and that the upstream may refuse.
    """

    path: str
    body: bytes | None
    family: str = ""
    needs: str = ""
    lacking: Callable[[int, bytes], bool] | None = None
    own: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)
    dropped: frozenset[str] = frozenset()
    marks: tuple[str, ...] = ()


def end_to_end(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    """The headers to forward: without `dropped` and without those that Connection names."""
    named: list[str] = []
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        # Some servers take an underscore for a hyphen.
        plain = name.lower().replace("_", "-")
        if plain == "connection":
            named += value.split(",")
        elif plain not in dropped:
            kept.add(name, value)
    for name in named:
        kept.popall(name.strip(), None)
    return kept


class UpstreamResponse:
    """An answer whose status and headers have arrived; the body follows. Use as a context manager."""

    def __init__(
        self,
        upstream: "Upstream",
        exchange: Exchange,
        deadline: float | None,
        has_slot: bool,
        share: MachineShare | None,
    ) -> None:
        self.upstream = upstream
        self.share = share
        """Its part of a machine that is paid by the hour."""
        self._exchange = exchange
        self._deadline = deadline
        self._has_slot = has_slot
        self._is_open = True
        self.status = exchange.status
        self.headers = end_to_end(exchange.headers, _DROPPED_RESPONSE_HEADERS)
        self.attempt: Attempt | None = None
        """Which form of the request it answers, if there were several."""
        self.model: str | None = None
        """The model that was asked, by the name that clients use."""
        self._is_watched = False
        self._held: list[bytes] = []
        self._is_read = False

    def __enter__(self) -> "UpstreamResponse":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Give back the connection and the slot. What is held of the body can still be read."""
        if self._is_open:
            self._is_open = False
            self._exchange.end()
            self.upstream.leave(self._has_slot, self.share)

    def watch(self) -> None:
        """From now on the end of its body, which may have been held already, says how well the upstream is."""
        self._is_watched = True
        if self._is_read:
            self.upstream.breaker.completed()

    @property
    def content_type(self) -> str:
        """Without parameters, in lower case."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    @property
    def date(self) -> str:
        """When the upstream says that it answered (RFC 9110, section 6.6.1); "" if it does not."""
        return self._exchange.headers.get("Date", "")

    async def chunk(self) -> bytes:
        """The next bytes of the body as they arrive; empty at the end. Raises UpstreamDisconnected when it breaks,
        UpstreamTimeout when nothing comes, and DeadlineExceeded.
        """
        if self._held:
            return self._held.pop(0)
        return b"" if self._is_read else await self._next()

    async def _next(self) -> bytes:
        upstream = self.upstream
        limit = idle = upstream.timeouts.idle
        if self._deadline is not None:
            limit = min(idle, max(0.0, self._deadline - upstream.loop.time()))
        try:
            chunk = await self._exchange.chunk(limit)
        except TimeoutError as error:
            if limit < idle:
                message = f"The deadline of the request ended within the answer of {upstream.title}."
                raise DeadlineExceeded(message) from error
            self._note_failure()
            raise UpstreamTimeout(f"{upstream.title} sent nothing for {idle:g} s within its answer.") from error
        except (aiohttp.ClientError, OSError) as error:
            self._note_failure()
            raise UpstreamDisconnected(f"{upstream.title} broke the connection within its answer.") from error
        if not chunk:
            self._is_read = True
            if self._is_watched:
                upstream.breaker.completed()
        return chunk

    def _note_failure(self) -> None:
        if self._is_watched:
            self.upstream.breaker.failed()

    async def hold(self, limit: int) -> bool:
        """Wait for the body, or more than `limit` bytes of it; `chunk` gives them once more. Returns whether it is
        whole. Raises what `chunk` raises.
        """
        size = sum(map(len, self._held))
        while size <= limit and not self._is_read and (chunk := await self._next()):
            self._held.append(chunk)
            size += len(chunk)
        return self._is_read

    @property
    def held(self) -> bytes:
        """What is held of the body."""
        return self._held[0] if len(self._held) == 1 else b"".join(self._held)

    async def peek(self, limit: int) -> bytes:
        """The whole body, which `chunk` gives once more. Raises what `body` raises."""
        if not await self.hold(limit):
            raise UpstreamDisconnected(f"{self.upstream.title} sent more than {limit} bytes.")
        return self.held

    async def body(self, limit: int) -> bytes:
        """The whole body. Raises what `chunk` raises, and UpstreamDisconnected if it is over `limit` bytes."""
        body = await self.peek(limit)
        self._held = []
        return body


class Upstream:
    """One base URL. `models` are the names under which it is asked, None while unknown; `in_flight` counts open
    requests.

    `name` is unique among all upstreams; `label` names it in metrics, `title` in messages.
    """

    def __init__(
        self,
        url: str,
        connections: ConnectionPool,
        timeouts: TimeoutSettings,
        label: str = "",
        settings: UpstreamSettings | None = None,
        breaker: BreakerSettings = BreakerSettings(),  # noqa: B008  # frozen
        workers: int = 1,
    ) -> None:
        """`workers` processes share its machine. Raises SettingsError if `settings` name a credential that is not
        there.
        """
        self.settings = settings or UpstreamSettings(url=url)
        base = URL(url)
        # "http://host:8000" and "http://host:8000/v1" are both what people paste.
        path = "/v1" if base.path in ("", "/") else base.raw_path.rstrip("/")
        self._path = path
        self._origin = Origin(base, upstream_context(self.settings))
        self._connections = connections
        self._key = api_key(self.settings)
        self._dropped = _DROPPED_REQUEST_HEADERS | (CREDENTIAL_HEADERS if self._key is not None else frozenset())
        self.timeouts = timeouts
        self.loop = asyncio.get_running_loop()
        self.name = self.settings.name or f"{base.host}:{base.port}"
        self.title = f"upstream {self.name}"
        self.url = url
        self.label = label or self.settings.name or url
        self.weight = self.settings.weight
        self.latency = 0.0
        price = self.settings.price_per_hour
        self.machine = None if price is None else Machine(price / workers)
        self.breaker = Breaker(breaker)
        self.slots = Slots(self.settings.max_requests, self.settings.max_waiting)
        self.models: frozenset[str] | None = None
        self.loaded: LoadedReport | None = None
        """Which models it has said to have in memory, if it loads them on demand."""
        self.prefix_stores = self._opened_stores(breaker)
        """Where its prefix store answers, if not at its own URL."""
        self.is_vllm = False
        """Whether its list of models says so."""
        self.reachable = False
        self.is_healthy = True
        """Whether its last health check went well."""
        self.busy_until = 0.0
        """Until when it has asked to be left alone with Retry-After; a time of the event loop."""
        self.in_flight = 0
        self.probed = False
        self.has: set[str] = set()
        """The endpoints, of those that are probed, that it has shown to have."""
        self.lacks: set[str] = set()
        """What it has shown not to have, by the names of `Attempt.needs`."""

    def _opened_stores(self, breaker: BreakerSettings) -> "tuple[Upstream, ...]":
        settings = self.settings
        stores = [
            UpstreamSettings(url=url, name=self.name, ca_file=settings.ca_file, verify_tls=settings.verify_tls)
            for url in settings.prefix_urls
        ]
        return tuple(Upstream(one.url, self._connections, self.timeouts, self.label, one, breaker) for one in stores)

    def read_api_key(self) -> None:
        """Read the credential again, which may have been replaced. Raises SettingsError if it is not there."""
        self._key = api_key(self.settings)

    @property
    def state(self) -> Literal["up", "half-open", "down"]:
        """`down` while it is left alone, cannot be reached or fails its health checks; `half-open` while one request
        tries it.
        """
        if self.breaker.state == "half-open":
            return "half-open"
        return "up" if self.is_well and self.breaker.state == "closed" else "down"

    @property
    def is_well(self) -> bool:
        return self.reachable and self.is_healthy

    @property
    def takes_salts(self) -> bool:
        """Whether it is told the tenant of a request by the field `cache_salt`."""
        return self.is_vllm if self.settings.cache_salt is None else self.settings.cache_salt

    def salt(self, namespace: str, own: object) -> str | None:
        """The salt that its KV blocks have of a tenant's request, whose client sends `own` as `cache_salt`."""
        if self.takes_salts:
            return cache_salt(namespace, own)
        return own if isinstance(own, str) and own else None

    @property
    def has_own_key(self) -> bool:
        """Whether it is sent the operator's credential, and none of a client's."""
        return self._key is not None

    def note_latency(self, seconds: float) -> None:
        """Count the time that an answer took to begin."""
        self.latency = seconds if not self.latency else self.latency + _NEWEST * (seconds - self.latency)

    def leave(self, has_slot: bool, share: MachineShare | None) -> None:
        """A request has ended."""
        self.in_flight -= 1
        if self.machine is not None and share is not None:
            self.machine.end(share)
        if has_slot:
            self.slots.release()

    async def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None,
        own: Mapping[str, str] = NO_HEADERS,
        dropped: frozenset[str] = frozenset(),
        *,
        deadline: float | None = None,
        tells_deadline: bool = False,
        priority: int | None = None,
    ) -> UpstreamResponse:
        """The answer to a request, once it has begun. `path` may carry a query; below /v1 it is relative to the base
        URL, and else to the base URL without its /v1.

        `headers` are the client's, of which those in `dropped` are not sent; those in `own` replace them. `deadline` is
        a time of the event loop, for the whole answer; with `tells_deadline` the upstream hears of it. With a
        `priority` the request waits for one of the slots of the upstream; without, it is sent in any case.

        Raises UpstreamUnreachable if there is no connection, UpstreamDisconnected if it ends before an answer begins,
        UpstreamTimeout if none begins in time, DeadlineExceeded, and TooManyRequests if its queue is full.
        """
        sent = end_to_end(headers, self._dropped | dropped if dropped else self._dropped)
        sent.update(own)
        if self._key is not None:
            self._use_own_key(sent, self._key)
        if body and self.settings.models:
            body = with_own_model(body, self.settings.models)
        has_slot = priority is not None and self.slots.limit is not None
        if priority is not None and has_slot:
            await self._take_slot(priority, deadline)
        self.in_flight += 1
        share = self.machine.begin() if self.machine is not None else None
        try:
            if deadline is not None:
                remaining = self._remaining(deadline)
                if tells_deadline:
                    sent[TIMEOUT_HEADER] = f"{remaining:.3f}"
            head = request_head(method, self._target(path), self._origin.host, sent, body)
            exchange = await self._begin(head, body, deadline, without_body=method == "HEAD")
        except BaseException:
            self.leave(has_slot, share)
            raise
        self.reachable = True
        answer = UpstreamResponse(self, exchange, deadline, has_slot, share)
        if 200 <= answer.status <= 599:
            return answer
        answer.end()
        raise UpstreamDisconnected(
            f"{self.title} answered with status {answer.status}, which is no final HTTP status (200 to 599)."
        )

    def _use_own_key(self, headers: CIMultiDict[str], key: str) -> None:
        for name in CREDENTIAL_HEADERS:
            headers.popall(name, None)
        header = self.settings.api_key_header
        headers[header] = f"Bearer {key}" if header == "authorization" else key

    def _remaining(self, deadline: float) -> float:
        """Seconds. Raises DeadlineExceeded if there are none."""
        seconds = deadline - self.loop.time()
        if seconds <= 0:
            raise DeadlineExceeded(f"The deadline of the request ended before {self.title} could be asked.")
        return seconds

    async def _take_slot(self, priority: int, deadline: float | None) -> None:
        limit = self.loop.time() + self.timeouts.total if deadline is None else deadline
        try:
            await self.slots.take(priority, limit)
        except QueueFull as error:
            rounds = (self.slots.waiting + 1) / (self.slots.limit or 1)
            raise TooManyRequests(
                f"{self.title} has {self.slots.taken} requests under way and {self.slots.waiting} waiting: it is full.",
                retry_after=min(60.0, rounds * self.latency),
            ) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"The deadline of the request ended in the queue of {self.title}.") from error

    def _target(self, path: str) -> str:
        if path.startswith("/v1/"):
            return self._path + path.removeprefix("/v1")
        return self._path.removesuffix("/v1") + path

    async def _begin(self, head: bytes, body: bytes | None, deadline: float | None, *, without_body: bool) -> Exchange:
        try:
            try:
                return await self._exchange(head, body, without_body, deadline)
            except _StaleConnection:
                return await self._exchange(head, body, without_body, deadline, new=True)
        except aiohttp.ConnectionTimeoutError as error:
            self._lost()
            raise UpstreamUnreachable(f"{self.title}: no connection in {self.timeouts.connect:g} s.") from error
        except TimeoutError as error:
            if deadline is not None and self.loop.time() >= deadline:
                message = f"The deadline of the request ended before {self.title} began to answer."
                raise DeadlineExceeded(message) from error
            raise UpstreamTimeout(f"{self.title} did not begin to answer in {self.timeouts.first_byte:g} s.") from error
        except aiohttp.ClientConnectorError as error:
            self._lost()
            raise UpstreamUnreachable(f"{self.title} cannot be reached: {_reason(error)}.") from error
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            # It has the request and may be computing.
            raise UpstreamDisconnected(f"{self.title} gave no answer: {_reason(error)}.") from error

    def _lost(self) -> None:
        """It may come back as another version, and is asked again what it has. Until then keys stay what they were."""
        self.reachable = self.probed = False

    async def _exchange(
        self, head: bytes, body: bytes | None, without_body: bool, deadline: float | None, *, new: bool = False
    ) -> Exchange:
        limit = self.timeouts.first_byte
        if deadline is None or deadline - self.loop.time() > self.timeouts.connect:
            connection, reused = await self._connections.connection(self._origin, new=new)
        else:
            async with asyncio.timeout_at(deadline):
                connection, reused = await self._connections.connection(self._origin, new=new)
        exchange = Exchange(connection)
        began = time.monotonic()
        if deadline is not None:
            limit = min(limit, max(0.0, deadline - self.loop.time()))
        try:
            await exchange.begin(head, body, without_body=without_body, read_timeout=limit)
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
