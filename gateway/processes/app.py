"""The composition root: builds the gateway from its parts, and has the table of routes.

The parts start in the order of `open_gateway` and stop in the reverse order.
"""

import asyncio
import contextlib
import errno
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from cache.errors import StoreUnavailable
from cache.exact import ExactCache
from cache.semantic.client import SemanticClient
from cache.stores.conversations import Conversations
from cache.stores.memory import MemoryStore
from cache.stores.redis_store import RedisStore, open_redis_store
from gateway.api import admin, anthropic, batches, generate, handlers, ollama, page, prefix_stores, responses, whole
from gateway.api.app_keys import CACHE, CONVERSATIONS, EMBEDDINGS, GAUGES, PIPELINE, ROUTER, SEMANTIC, SETTINGS
from gateway.api.openapi.document import openapi_handler
from gateway.api.stats import GaugeUpdater
from gateway.batches.runner import RunnerOptions, open_batches
from gateway.batches.store import BatchStore
from gateway.http.background_tasks import background_tasks
from gateway.http.cors import answering_preflights, marking_answers
from gateway.http.middleware import answering_errors, mark_started
from gateway.http.server import Handler, HttpServer
from gateway.metrics import HitCounter
from gateway.pipeline import Pipeline
from gateway.processes.embedded_store import embedded_store
from gateway.processes.semantic_service import semantic_service
from gateway.proxy.conversations import ConversationKeeper
from gateway.proxy.embeddings import Embeddings
from gateway.proxy.fast_path import FastPath
from gateway.proxy.flight import FlightTable
from gateway.proxy.lookup import Lookup
from gateway.proxy.prompt_caches.planner import PromptCachePlanner
from gateway.proxy.relay import Relay
from gateway.proxy.replay import Replay
from gateway.proxy.semantic_lookup import SemanticLookup
from gateway.proxy.single_flight import SingleFlight
from gateway.routing.router import Router
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings
from gateway.surfaces.registry import PROBED_PATHS, error_response, form_of
from gateway.surfaces.whole import ENDPOINTS
from gateway.upstreams.connection import ConnectionPool, open_connections
from gateway.upstreams.mock import MockUpstream, load_script
from gateway.upstreams.upstream import Upstream

# Entries stay an hour beyond their lifetime, for requests that say max-stale.
_KEPT_FOR_MAX_STALE = 3600.0
_GAUGE_SECONDS = 1.0
# For a client that has sent no request, or only part of its head; longer than common load balancers keep theirs.
_IDLE_CONNECTION_SECONDS = 75.0


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway that listens at `url`. `redis_url` is the shared store's, "" for none."""

    url: str
    port: int
    redis_url: str
    router: Router
    cache: ExactCache
    connections: ConnectionPool


@asynccontextmanager
async def open_gateway(
    settings: Settings, *, share_port: bool = False, semantic_socket: Path | None = None
) -> AsyncIterator[Gateway]:
    """Run a gateway: stores, upstreams, flights, server. The caller runs the local backend and, if `semantic_socket` is
    given, the semantic cache's process.

    Raises SettingsError when a setting cannot be applied, such as a port that is in use.
    """
    cache_settings = settings.cache
    keep_stale = max(_KEPT_FOR_MAX_STALE, cache_settings.stale_while_revalidate, cache_settings.stale_if_error)
    async with (
        _redis_url(settings) as redis_url,
        _redis(settings, redis_url) as redis,
        _semantic_client(settings, redis_url, semantic_socket) as semantic_client,
        open_connections(settings.timeouts.connect) as connections,
        _upstream_urls(settings) as urls,
        background_tasks() as tasks,
    ):
        cache = ExactCache(MemoryStore(cache_settings.memory), redis, keep_stale)
        with contextlib.suppress(StoreUnavailable):  # follow_purges reads it later
            await cache.sync_purges()
        router = Router(*(Upstream(url, connections, settings.timeouts) for url in urls), probed=PROBED_PATHS)
        flights = FlightTable(tasks)
        tasks.keep(cache.follow_purges)
        tasks.keep(router.refresh_forever)
        hits = HitCounter()
        gauges = GaugeUpdater(cache, flights, hits)
        tasks.keep(functools.partial(_keep_gauges, gauges))
        if semantic_client is not None:
            tasks.keep(semantic_client.watch)
        semantic = SemanticLookup(semantic_client, cache, settings, tasks)
        lookup = Lookup(cache, settings.cache)
        conversations = ConversationKeeper(Conversations(redis, settings.responses_ttl))
        pipeline = Pipeline(
            lookup,
            semantic,
            Replay(
                cache, conversations, hits, varies=cache_settings.sampled == "variants" or cache_settings.regenerate > 0
            ),
            SingleFlight(cache, semantic, flights, router, settings.cache, _prompt_caches(settings, router)),
            Relay(lookup, conversations, settings.timeouts.client),
        )
        embeddings = Embeddings(cache, router, tasks, settings.cache)
        application = build_application(settings, cache, semantic, router, pipeline, embeddings, conversations, gauges)
        fast_path = functools.partial(FastPath, cache=cache, settings=settings, hits=hits)
        async with (
            _listening(application, settings, fast_path, share_port) as (url, port),
            _running_batches(application, settings, url),
        ):
            yield Gateway(url, port, redis_url, router, cache, connections)


def build_application(
    settings: Settings,
    cache: ExactCache,
    semantic: SemanticLookup,
    router: Router,
    pipeline: Pipeline,
    embeddings: Embeddings,
    conversations: ConversationKeeper,
    gauges: GaugeUpdater,
) -> web.Application:
    application = web.Application(
        middlewares=[
            answering_preflights(settings.cors_origins),
            answering_errors(lambda path, error: error_response(form_of(path), error)),
        ],
        client_max_size=settings.max_body,
    )
    application[SETTINGS] = settings
    application[CACHE] = cache
    application[SEMANTIC] = semantic
    application[ROUTER] = router
    application[PIPELINE] = pipeline
    application[EMBEDDINGS] = embeddings
    application[CONVERSATIONS] = conversations
    application[GAUGES] = gauges
    application[batches.BATCHES] = BatchStore(settings.state_path(), settings.batches.max_file)
    application.on_response_prepare.append(mark_started)
    if settings.cors_origins:
        application.on_response_prepare.append(marking_answers(settings.cors_origins))
    application.add_routes(
        [
            web.post("/v1/chat/completions", handlers.answer),
            web.post("/v1/completions", handlers.answer),
            web.post("/v1/embeddings", handlers.embed),
            *(web.post(path, whole.answer) for endpoint in ENDPOINTS for path in endpoint.paths),
            web.post("/v1/responses", handlers.answer),
            web.get("/v1/responses/{id}", responses.get),
            web.delete("/v1/responses/{id}", responses.delete),
            web.get("/v1/responses/{id}/input_items", responses.get_input_items),
            web.post("/v1/generate", handlers.answer),
            web.post("/v1/generate/batch", generate.generate_batch),
            web.post("/v1/messages", handlers.answer),
            web.post("/v1/messages/count_tokens", anthropic.count_tokens),
            web.post("/api/chat", ollama.answer_or_load),
            web.post("/api/generate", ollama.answer_or_load),
            web.post("/api/embed", ollama.embed),
            web.post("/api/embeddings", ollama.embed),
            web.get("/api/tags", ollama.list_models),
            web.get("/api/ps", ollama.list_running),
            web.post("/api/show", ollama.show),
            web.post("/api/pull", ollama.pull),
            web.get("/api/version", ollama.show_version),
            web.get("/v1/models", handlers.list_models),
            web.get("/v1/models/{model:.+}", handlers.show_model),
            web.get("/v1/cache/stats", admin.get_stats),
            web.get("/v1/cache/entries/{id}", admin.get_entry),
            web.delete("/v1/cache/entries/{id}", admin.delete_entry),
            web.delete("/v1/cache", admin.purge),
            web.get("/v1/cache/prefix", prefix_stores.describe),
            web.delete("/v1/cache/prefix", prefix_stores.clear),
            web.post("/v1/cache/prefix/{operation:lookup|pin|unpin}", prefix_stores.operate),
            web.route("*", "/v1/cache{rest:(/.*)?}", handlers.not_found),
            *(batches.ROUTES if settings.batches.enabled else ()),
            web.route("*", "/v1/{rest:.+}", handlers.forward),
            web.get("/", page.show),
            web.get("/openapi.json", openapi_handler(application)),
            web.get("/health", handlers.health),
            web.get("/ready", handlers.ready),
            web.get("/metrics", handlers.expose_metrics),
        ]
    )
    return application


def _prompt_caches(settings: Settings, router: Router) -> PromptCachePlanner | None:
    return PromptCachePlanner(settings.prompt_cache, router) if settings.prompt_cache.mode == "mark" else None


@asynccontextmanager
async def _running_batches(application: web.Application, settings: Settings, url: str) -> AsyncIterator[None]:
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
    async with open_batches(application[batches.BATCHES], url, options):
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
    async with contextlib.AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(open_redis_store(url, settings.cache.redis_deadline))
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
async def _upstream_urls(settings: Settings) -> AsyncIterator[list[str]]:
    """The URLs of the upstreams in the settings; `mock:` ones are served by this process."""
    async with contextlib.AsyncExitStack() as stack:
        urls: list[str] = []
        for server in settings.servers:
            url = server.url
            if url.startswith("mock:"):
                script = url.removeprefix("mock:")
                mock = MockUpstream(load_script(Path(script)) if script else ())
                url = (await stack.enter_async_context(mock.serving())).url
            urls.append(url)
        yield urls


@asynccontextmanager
async def _listening(
    application: web.Application, settings: Settings, fast_path: Callable[[Handler], FastPath], share_port: bool
) -> AsyncIterator[tuple[str, int]]:
    application_runner = web.AppRunner(application)
    await application_runner.setup()
    assert application_runner.server is not None  # noqa: S101  # setup() has made it
    server = HttpServer(
        application_runner.server,
        settings.timeouts.client,
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=_IDLE_CONNECTION_SECONDS,
    )
    server.request_handler = fast_path(server.request_handler)
    runner = web.ServerRunner(server, shutdown_timeout=settings.timeouts.shutdown)
    await runner.setup()
    try:
        site = web.TCPSite(runner, settings.host, settings.port, reuse_port=share_port or None, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            raise SettingsError(_listen_error(settings, error)) from error
        port = runner.addresses[0][1]
        host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104  # compared, not bound
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}", port
    finally:
        await runner.cleanup()
        await application_runner.cleanup()


def _listen_error(settings: Settings, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port: {settings.port} is taken on {settings.host}; choose another with --port or KEEPGATE_PORT"
    return f"host: cannot listen on {settings.host}:{settings.port}: {error.strerror}"


async def _keep_gauges(gauges: GaugeUpdater) -> None:
    """Refresh the gauges: another worker may answer GET /metrics for this one."""
    while True:
        gauges.refresh()
        await asyncio.sleep(_GAUGE_SECONDS)
