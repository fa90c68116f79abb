"""Follows the KV cache events of all upstreams that publish them."""

import asyncio
import importlib.util
import logging
from collections.abc import Sequence

from gateway.http.background_tasks import BackgroundTasks
from gateway.routing.prefixes.block_snapshots import BlockSnapshots
from gateway.routing.prefixes.event_sources import EventSource, configured_source, listed_sources
from gateway.routing.prefixes.kv_events import EngineBlocks
from gateway.settings.fields import SettingsError
from gateway.upstreams.upstream import Upstream

log = logging.getLogger(__name__)

_AUTO = "auto"
_RECHECK = 15.0
"""Seconds until an upstream is asked again where it publishes: after a restart it may be elsewhere."""
_RETRY = 1.0


class UpstreamBlocks:
    """The blocks of an upstream: of each of its data-parallel ranks, by where it publishes."""

    def __init__(self) -> None:
        self.ranks: dict[EventSource, EngineBlocks] = {}

    def __len__(self) -> int:
        return sum(map(len, self.ranks.values()))

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are known."""
        return bool(self.ranks) and all(blocks.is_whole for blocks in self.ranks.values())

    @property
    def adapters(self) -> set[str]:
        """Names of models whose blocks are not known: LoRA adapters."""
        return set().union(*(blocks.adapters for blocks in self.ranks.values()))

    def leading(self, tokens: Sequence[int], salt: str | None = None) -> float:
        """How many leading tokens of a prompt a request with this salt finds there, on average over the ranks: which of
        them gets it, the upstream decides without a look at its blocks.
        """
        return sum(blocks.leading(tokens, salt) for blocks in self.ranks.values()) / max(1, len(self.ranks))


class EventFollower:
    """Follows upstreams; `blocks` are theirs, by their names."""

    def __init__(self, tasks: BackgroundTasks, snapshots: BlockSnapshots | None = None) -> None:
        self._tasks = tasks
        self._snapshots = snapshots
        self._following: dict[Upstream, asyncio.Task[None]] = {}
        self.blocks: dict[str, UpstreamBlocks] = {}

    def check(self, upstreams: Sequence[Upstream]) -> None:
        """Raises SettingsError where an upstream publishes events and the extra is not installed."""
        for upstream in upstreams:
            if upstream.settings.kv_events is not None and importlib.util.find_spec("zmq") is None:
                raise SettingsError(
                    f"upstreams: {upstream.name}: kv_events: not installed; install the extra: pip install"
                    " 'keepgate[kv-events]'"
                )

    def follow(self, upstreams: Sequence[Upstream]) -> None:
        """Follow these, and no others any longer."""
        for former in [upstream for upstream in self._following if upstream not in upstreams]:
            self._following.pop(former).cancel()
            self.blocks.pop(former.name, None)
        for upstream in upstreams:
            if upstream.settings.kv_events is None or upstream in self._following:
                continue
            blocks = self.blocks[upstream.name] = UpstreamBlocks()
            self._following[upstream] = self._tasks.keep(
                lambda upstream=upstream, blocks=blocks: self._follow(upstream, blocks)  # type: ignore[misc]
            )

    async def _follow(self, upstream: Upstream, blocks: UpstreamBlocks) -> None:
        """Follow all ranks of an upstream, and those that take their place."""
        from gateway.routing.prefixes.kv_subscription import Subscription  # pyzmq, only where it is needed

        following: dict[EventSource, asyncio.Task[None]] = {}
        blocks.ranks.clear()
        is_told = False
        async with asyncio.TaskGroup() as tasks:
            while True:
                sources = await _sources(upstream)
                if not sources and upstream.reachable and not is_told:
                    is_told = True
                    log.warning("%s lists no publisher of KV cache events; the history counts", upstream.title)
                if sources is None:  # it is known again when the upstream is back
                    await asyncio.sleep(_RETRY)
                    continue
                for former in following.keys() - sources:
                    following.pop(former).cancel()
                    del blocks.ranks[former]
                for source in sources - following.keys():
                    subscription = Subscription(source, self._snapshots)
                    blocks.ranks[source] = subscription.blocks
                    following[source] = tasks.create_task(subscription.follow())
                await asyncio.sleep(_RECHECK if sources else _RETRY)


async def _sources(upstream: Upstream) -> frozenset[EventSource] | None:
    address = upstream.settings.kv_events or ""
    return await listed_sources(upstream) if address == _AUTO else frozenset({configured_source(address)})
