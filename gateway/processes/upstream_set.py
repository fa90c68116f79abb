"""The upstreams of the settings: their routing, `mock:` servers, and what they say of their KV blocks."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore
from gateway.http.background_tasks import BackgroundTasks, background_tasks
from gateway.routing.overrides import StrategyOverrides
from gateway.routing.prefixes.block_snapshots import BlockSnapshots
from gateway.routing.prefixes.engine_index import LOOKUP_PATH
from gateway.routing.prefixes.event_follower import EventFollower
from gateway.routing.prefixes.history import PrefixHistory
from gateway.routing.prefixes.shared_history import SharedPrefixHistory
from gateway.routing.prefixes.views import PrefixViews
from gateway.routing.router import Router, RouterOptions
from gateway.routing.table import RoutingTable, blocks_of_each
from gateway.settings.settings import Settings
from gateway.settings.upstreams import UpstreamSettings
from gateway.surfaces.registry import PROBED_PATHS
from gateway.upstreams.connection import ConnectionPool
from gateway.upstreams.mock import MockUpstream, load_script
from gateway.upstreams.upstream import Upstream


class _Configured(NamedTuple):
    settings: UpstreamSettings
    upstream: Upstream


class UpstreamSet:
    """Make one with `open_upstreams`. `router`, `table` and `views` stay the same objects when the settings change."""

    def __init__(
        self,
        settings: Settings,
        connections: ConnectionPool,
        history: PrefixHistory,
        mocks: contextlib.AsyncExitStack,
        tasks: BackgroundTasks,
        redis: RedisStore | None,
    ) -> None:
        self.router = Router(probed=(*PROBED_PATHS, LOOKUP_PATH))
        self.table = RoutingTable(Settings(), history)
        self.overrides = StrategyOverrides(self.table, redis)
        self._events = EventFollower(tasks, None if redis is None else BlockSnapshots(redis))
        self.views = PrefixViews(self._events.blocks)
        self._connections = connections
        self._mocks = mocks
        self._mock_urls: dict[str, str] = {}
        self._configured: list[_Configured] = []
        self._settings = settings

    async def apply(self, settings: Settings) -> None:
        """Route further requests as the settings say. An upstream whose settings are the same stays as it is.

        Raises SettingsError; then nothing has changed.
        """
        servers = [replace(server, url=await self._url(server.url)) for server in settings.servers]
        is_same = (settings.timeouts, settings.breaker) == (self._settings.timeouts, self._settings.breaker)
        kept: list[_Configured] = []
        for server in servers:
            known = next((each for each in self._configured if each.settings == server), None) if is_same else None
            if known is not None and server.api_key is not None:
                known.upstream.read_api_key()
            kept.append(known or _Configured(server, self._made(server, settings)))
        self._events.check([each.upstream for each in kept])
        self.table.reload(replace(settings, upstreams=tuple(servers)))
        self.router.options = RouterOptions(
            retries=settings.retries,
            hedging=settings.hedging,
            health=settings.health,
            total=settings.timeouts.total,
            strategy_of=self.table.strategy,
            upstreams_of=self.table.upstreams,
            is_used=self.table.is_used,
        )
        before, self._configured = self._configured, kept
        for each in before:
            if each not in kept:
                self.router.remove(each.upstream)
        for each in kept:
            if each not in before:
                self.router.add(each.upstream)
        self._events.follow([each.upstream for each in kept])
        self._settings = settings

    def _made(self, server: UpstreamSettings, settings: Settings) -> Upstream:
        return Upstream(
            server.url,
            self._connections,
            settings.timeouts,
            settings=server,
            breaker=settings.breaker,
            workers=settings.workers,
        )

    async def _url(self, url: str) -> str:
        """The address of an upstream; a `mock:` one is served by this process, until the gateway ends."""
        if not url.startswith("mock:"):
            return url
        if url not in self._mock_urls:
            script = url.removeprefix("mock:")
            mock = MockUpstream(load_script(Path(script)) if script else ())
            self._mock_urls[url] = (await self._mocks.enter_async_context(mock.serving())).url
        return self._mock_urls[url]


@asynccontextmanager
async def open_upstreams(
    settings: Settings, connections: ConnectionPool, redis: RedisStore | None
) -> AsyncIterator[UpstreamSet]:
    """The upstreams of the settings, checked until the end. Raises SettingsError."""
    async with contextlib.AsyncExitStack() as mocks, background_tasks() as tasks:
        capacity = blocks_of_each(settings)
        history = PrefixHistory(capacity)
        if redis is not None:
            history = shared = SharedPrefixHistory(capacity)
            store = redis
            tasks.keep(lambda: shared.share(store))
            tasks.keep(lambda: shared.follow(store))
        upstreams = UpstreamSet(settings, connections, history, mocks, tasks, redis)
        await upstreams.apply(settings)
        if redis is not None:
            with contextlib.suppress(StoreUnavailable):  # it is read again and again
                await upstreams.overrides.read()
            tasks.keep(upstreams.overrides.follow)
        tasks.keep(upstreams.router.check_forever)
        yield upstreams
