"""The composition root: builds the gateway from its parts.

The parts start in the order of `_open_parts` and stop in the reverse order. What follows from the settings is built
anew when they are read again (`Gateway.reload`).
"""

import asyncio
import contextlib
import errno
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from ssl import SSLContext

from aiohttp import web
from yarl import URL

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.semantic.client import SemanticClient
from cache.stores.conversations import Conversations
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore, open_redis_store
from gateway.api.app_keys import (
    ADMISSIONS,
    CACHE,
    CONVERSATIONS,
    EMBEDDINGS,
    GAUGES,
    LOOKUP,
    OVERRIDES,
    PIPELINE,
    RECENT_REQUESTS,
    ROUTER,
    ROUTING,
    SEMANTIC,
    STATISTICS,
    VIEWS,
)
from gateway.api.batches import BATCHES
from gateway.api.operator.costs import LEDGER, PRICING
from gateway.api.operator.keys import REGISTRY
from gateway.api.stats import GaugeUpdater
from gateway.batches.runner import RunnerOptions, open_batches
from gateway.batches.store import BatchStore
from gateway.costs.ledger import Ledger, open_ledger
from gateway.costs.pricing import Pricing
from gateway.http.background_tasks import BackgroundTasks, background_tasks
from gateway.http.hosts import HostCheck
from gateway.http.server import HttpServer
from gateway.http.tls import load_certificate, make_ssl_context
from gateway.pipeline import Pipeline
from gateway.processes.embedded_store import embedded_store
from gateway.processes.routes import build_application
from gateway.processes.semantic_service import semantic_service
from gateway.processes.upstream_set import UpstreamSet, open_upstreams
from gateway.proxy.conversations import ConversationKeeper
from gateway.proxy.embeddings import Embeddings
from gateway.proxy.fast_path import FastPath
from gateway.proxy.flight import FlightTable
from gateway.proxy.lookup import Lookup
from gateway.proxy.metering.accounting import Accounting
from gateway.proxy.metering.admissions import Admissions
from gateway.proxy.predictions.drafts import Drafts
from gateway.proxy.prompt_caches.planner import PromptCachePlanner
from gateway.proxy.relay import Relay
from gateway.proxy.replay import Replay
from gateway.proxy.semantic_lookup import SemanticLookup
from gateway.proxy.single_flight import SingleFlight
from gateway.routing.router import Router
from gateway.settings.encryption_keys import encryption_of
from gateway.settings.fields import SettingsError
from gateway.settings.reloading import reloaded
from gateway.settings.settings import Settings
from gateway.telemetry.audit import AUDIT, AuditLog
from gateway.telemetry.recent_requests import RecentRequests
from gateway.telemetry.request_log import RequestLog
from gateway.telemetry.statistics import Statistics, open_statistics
from gateway.telemetry.tracing import open_tracing
from gateway.tenants.callers import Callers
from gateway.tenants.key_registry import KeyRegistry
from gateway.tenants.limiter import Limiter, open_limiter
from gateway.upstreams.connection import ConnectionPool, open_connections
from telemetry.logs import configure_logging

# Entries stay an hour beyond their lifetime, for requests that say max-stale.
_KEPT_FOR_MAX_STALE = 3600.0
_GAUGE_SECONDS = 1.0
# For a client that has sent no request, or only part of its head; longer than common load balancers keep theirs.
_IDLE_CONNECTION_SECONDS = 75.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What lives as long as the gateway, whatever its settings become."""

    redis_url: str
    cache: ExactCache
    semantic: SemanticLookup
    connections: ConnectionPool
    upstreams: UpstreamSet
    flights: FlightTable
    conversations: ConversationKeeper
    batches: BatchStore
    tasks: BackgroundTasks
    gauges: GaugeUpdater
    callers: Callers
    limiter: Limiter
    registry: KeyRegistry | None
    ledger: Ledger
    statistics: Statistics
    recent: RecentRequests
    requests: RequestLog


class Gateway:
    """A running gateway that listens at `url`."""

    def __init__(
        self,
        settings: Settings,
        parts: Parts,
        server: HttpServer,
        runner: web.ServerRunner,
        tls: SSLContext | None,
        url: str,
    ) -> None:
        self.settings = settings
        self.url = url
        self._parts = parts
        self._server = server
        self._runner = runner
        self._tls = tls

    async def refuse(self) -> None:
        """Accept no more connections, and end those that are idle; requests under way have `timeouts.shutdown` seconds
        from now.
        """
        for site in list(self._runner.sites):
            await site.stop()
        await self._server.drain(self.settings.timeouts.shutdown)

    @property
    def port(self) -> int:
        port = URL(self.url).port
        assert port is not None  # noqa: S101  # it is part of the URL
        return port

    @property
    def redis_url(self) -> str:
        """The shared store's; "" for none."""
        return self._parts.redis_url

    @property
    def router(self) -> Router:
        return self._parts.upstreams.router

    @property
    def cache(self) -> ExactCache:
        return self._parts.cache

    @property
    def connections(self) -> ConnectionPool:
        return self._parts.connections

    async def reload(self, wanted: Settings) -> Sequence[str]:
        """Answer further requests as new settings say; those under way end as they began.

        Returns the names of settings that differ and wait for the next start. Raises SettingsError when the new
        settings cannot be applied: then nothing has changed.
        """
        settings, waiting = reloaded(self.settings, wanted)
        await self._parts.upstreams.apply(settings)
        if self._tls is not None:
            load_certificate(self._tls, settings.tls)
        await _use(self._server, settings, self._parts)
        self._parts.requests.settings = settings.log
        configure_logging(settings.log.format, settings.log_level)
        self.settings = settings
        return waiting


@asynccontextmanager
async def open_gateway(
    settings: Settings, *, share_port: bool = False, semantic_socket: Path | None = None
) -> AsyncIterator[Gateway]:
    """Run a gateway: stores, upstreams, flights, server. The caller runs the local backend and, if `semantic_socket` is
    given, the semantic cache's process.

    Raises SettingsError when a setting cannot be applied, such as a port that is in use.
    """
    async with (
        _open_parts(settings, semantic_socket) as parts,
        _listening(settings, parts, share_port) as gateway,
        _running_batches(parts.batches, settings, gateway.url),
    ):
        yield gateway


@asynccontextmanager
async def _open_parts(settings: Settings, semantic_socket: Path | None) -> AsyncIterator[Parts]:
    async with (
        _redis_url(settings) as redis_url,
        _redis(settings, redis_url) as redis,
        _semantic_client(settings, redis_url, semantic_socket) as semantic_client,
        open_connections(settings.timeouts.connect) as connections,
        open_upstreams(settings, connections, redis) as upstreams,
        open_limiter(redis, settings.keys) as limiter,
        open_ledger(redis, settings.costs.keep) as ledger,
        open_statistics(redis, settings.costs.keep) as statistics,
        open_tracing(settings.traces) as tracing,
        background_tasks() as tasks,
    ):
        keep_stale = max(_KEPT_FOR_MAX_STALE, settings.cache.stale_while_revalidate, settings.cache.stale_if_error)
        cache = ExactCache(MemoryStore(settings.cache.memory), redis, keep_stale)
        with contextlib.suppress(StoreUnavailable):  # follow_purges reads it later
            await cache.sync_purges()
        flights = FlightTable(tasks)
        recent = RecentRequests(redis)
        requests = RequestLog(settings.log, tracing, statistics, recent)
        conversations = Conversations(redis, settings.responses_ttl)
        ledger.listed_models = lambda: upstreams.router.models
        parts = Parts(
            redis_url=redis_url,
            cache=cache,
            semantic=SemanticLookup(semantic_client, cache, settings, tasks),
            connections=connections,
            upstreams=upstreams,
            flights=flights,
            conversations=ConversationKeeper(conversations),
            batches=BatchStore(settings.state_path(), settings.batches.max_file),
            tasks=tasks,
            gauges=GaugeUpdater(cache, conversations, flights, requests, lambda: upstreams.router.upstreams),
            callers=Callers(redis, settings),
            limiter=limiter,
            registry=None if redis is None else KeyRegistry(redis),
            ledger=ledger,
            statistics=statistics,
            recent=recent,
            requests=requests,
        )
        tasks.keep(cache.follow_purges)
        tasks.keep(cache.keep_index)
        tasks.keep(ledger.flush_forever)
        tasks.keep(statistics.flush_forever)
        tasks.keep(recent.flush_forever)
        if settings.keys.required:
            tasks.keep(parts.callers.follow)
        tasks.keep(functools.partial(_keep_gauges, parts.gauges))
        if semantic_client is not None:
            tasks.keep(semantic_client.watch)
        yield parts


async def _use(server: HttpServer, settings: Settings, parts: Parts) -> None:
    """Let the server answer further requests as the settings say, on connections that are open as well."""
    server.restrict(HostCheck(settings), settings.limits.max_connections)
    router = parts.upstreams.router
    lookup = Lookup(parts.cache, settings.cache)
    pricing = Pricing(settings.costs, lambda: router.upstreams)
    accounting = Accounting(parts.ledger, pricing if settings.costs.enabled else None, parts.cache.index)
    parts.gauges.pricing = pricing
    varies = settings.cache.sampled == "variants" or settings.cache.regenerate > 0
    admissions = Admissions(parts.limiter, accounting, settings)
    pipeline = Pipeline(
        admissions,
        accounting,
        lookup,
        parts.semantic,
        Replay(parts.cache, parts.conversations, accounting, varies=varies),
        SingleFlight(
            parts.cache,
            parts.semantic,
            parts.flights,
            router,
            settings.cache,
            _prompt_caches(settings, router),
            Drafts(parts.cache, router) if settings.cache.predictions else None,
            parts.upstreams.table,
            parts.upstreams.views,
            accounting,
        ),
        Relay(lookup, parts.conversations, settings.timeouts.client),
    )
    application = build_application(
        settings,
        parts.callers,
        {
            ADMISSIONS: admissions,
            LEDGER: parts.ledger,
            STATISTICS: parts.statistics,
            RECENT_REQUESTS: parts.recent,
            PRICING: pricing,
            **({REGISTRY: parts.registry} if parts.registry is not None else {}),
            CACHE: parts.cache,
            LOOKUP: lookup,
            SEMANTIC: parts.semantic,
            ROUTER: router,
            ROUTING: parts.upstreams.table,
            VIEWS: parts.upstreams.views,
            OVERRIDES: parts.upstreams.overrides,
            PIPELINE: pipeline,
            EMBEDDINGS: Embeddings(parts.cache, router, parts.tasks, settings.cache, admissions, accounting),
            CONVERSATIONS: parts.conversations,
            GAUGES: parts.gauges,
            BATCHES: parts.batches,
            AUDIT: AuditLog(settings),
        },
    )
    runner = web.AppRunner(application)
    await runner.setup()  # it has no resources of its own: nothing is to be cleaned up
    assert runner.server is not None  # noqa: S101  # setup() has made it
    server.use(
        runner.server,
        lambda handler: FastPath(
            handler, parts.cache, parts.callers, parts.limiter, settings, accounting, parts.requests
        ),
    )


def _prompt_caches(settings: Settings, router: Router) -> PromptCachePlanner | None:
    return PromptCachePlanner(settings.prompt_cache, router) if settings.prompt_cache.mode == "mark" else None


@asynccontextmanager
async def _running_batches(store: BatchStore, settings: Settings, url: str) -> AsyncIterator[None]:
    """Run batches, whose requests go to this gateway's own address."""
    if not settings.batches.enabled:
        yield
        return
    timeouts = settings.timeouts
    options = RunnerOptions(
        concurrency=settings.batches.concurrency,
        max_line=settings.max_body,
        answer_timeout=timeouts.first_byte + timeouts.idle,
    )
    async with open_batches(store, url, options):
        yield


@asynccontextmanager
async def _redis_url(settings: Settings) -> AsyncIterator[str]:
    """The URL of the shared store; "" for none."""
    if settings.redis == "embedded":
        async with embedded_store(settings.state_path(), settings.cache.embedded_memory) as url:
            yield url
    else:
        yield "" if settings.redis == "none" else settings.redis


@asynccontextmanager
async def _redis(settings: Settings, url: str) -> AsyncIterator[RedisStore | None]:
    if not url:
        yield None
        return
    encryption = encryption_of(settings.encryption)
    async with contextlib.AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(open_redis_store(url, settings.cache.redis_deadline, encryption))
        except (StoreUnavailable, ValueError) as error:
            raise SettingsError(f"redis: {error}") from error
        yield store


@asynccontextmanager
async def _semantic_client(
    settings: Settings, redis_url: str, socket: Path | None
) -> AsyncIterator[SemanticClient | None]:
    if settings.semantic.mode == "off":
        yield None
        return
    async with contextlib.AsyncExitStack() as stack:
        if socket is None:
            socket = await stack.enter_async_context(semantic_service(settings, redis_url))
        assert socket is not None  # noqa: S101  # it is on
        yield SemanticClient(socket, settings.semantic.deadline)


@asynccontextmanager
async def _listening(settings: Settings, parts: Parts, share_port: bool) -> AsyncIterator[Gateway]:
    server = HttpServer(
        settings.timeouts.client,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=_IDLE_CONNECTION_SECONDS,
    )
    tls = make_ssl_context(settings.tls)
    server.interrupt = parts.flights.interrupt
    await _use(server, settings, parts)
    runner = web.ServerRunner(server)
    await runner.setup()
    try:
        site = web.TCPSite(
            runner, settings.host, settings.port, ssl_context=tls, reuse_port=share_port or None, backlog=1024
        )
        try:
            await site.start()
        except OSError as error:
            raise SettingsError(_listen_error(settings, error)) from error
        port = runner.addresses[0][1]
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104  # compared, not bound
        scheme = "http" if tls is None else "https"
        url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        gateway = Gateway(settings, parts, server, runner, tls, url)
        try:
            yield gateway
        finally:
            await gateway.refuse()
    finally:
        await runner.cleanup()


def _listen_error(settings: Settings, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port: {settings.port} is taken on {settings.host}; choose another with --port or KEEPGATE_PORT"
    return f"host: cannot listen on {settings.host}:{settings.port}: {error.strerror}"


async def _keep_gauges(gauges: GaugeUpdater) -> None:
    """Refresh the gauges: another worker may answer GET /metrics for this one."""
    while True:
        gauges.refresh()
        await asyncio.sleep(_GAUGE_SECONDS)
