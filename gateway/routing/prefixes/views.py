"""What upstreams say themselves of the KV blocks that they hold."""

import asyncio
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from gateway.http.background_tasks import BackgroundTasks
from gateway.routing.prefixes.asking import Asker, Prompt
from gateway.routing.prefixes.engine_index import LOOKUP_PATH, EngineIndex
from gateway.routing.prefixes.kv_events import EngineBlocks
from gateway.settings.fields import SettingsError
from gateway.upstreams.upstream import Upstream

_DEADLINE = 0.02
_TOKENIZE_PATH = "/tokenize"


class PrefixView(Protocol):
    """A way to know what upstreams hold."""

    async def shares(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        """The leading share of the prompt, from 0 to 1, that upstreams hold, by their names; without those of which it
        is not known. Takes 20 ms at most, and raises nothing.
        """


class PublishedBlocks:
    """A view from KV cache events. These are of tokens: an upstream that publishes them is asked for the prompt's."""

    def __init__(self, asker: Asker, blocks: Mapping[str, EngineBlocks]) -> None:
        """`blocks` are those of each upstream that publishes, by its name."""
        self._asker = asker
        self._blocks = blocks

    async def shares(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        known = {
            upstream.name: blocks
            for upstream in upstreams
            if (blocks := self._blocks.get(upstream.name)) is not None and len(blocks)
        }
        # All have the same model, and so the same tokens.
        asked = next((upstream for upstream in upstreams if upstream.name in known), None)
        reply = await self._asker.ask(asked, _TOKENIZE_PATH, prompt) if asked is not None else None
        tokens = (reply or {}).get("tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, int) for token in tokens):
            return {}
        leading = {name: blocks.leading(tokens) for name, blocks in known.items()}
        # Where events were missed, no block means nothing.
        return {name: count / len(tokens) for name, count in leading.items() if count or known[name].is_whole}


class PrefixViews:
    """All views as one."""

    def __init__(self, published: Mapping[str, EngineBlocks]) -> None:
        self._published = published
        self._views: tuple[PrefixView, ...] = (
            EngineIndex(Asker(_DEADLINE)),
            PublishedBlocks(Asker(_DEADLINE), published),
        )

    def may_know(self, upstreams: Sequence[Upstream]) -> bool:
        """Whether asking can be of use: some upstream has an index or publishes events."""
        return any(LOOKUP_PATH in upstream.has or upstream.name in self._published for upstream in upstreams)

    async def held(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        """For `RouteRequest.held`, within 20 ms. What events say counts before what an index says."""
        if not self.may_know(upstreams):
            return {}
        found: dict[str, float] = {}
        for shares in await asyncio.gather(*(view.shares(upstreams, prompt) for view in self._views)):
            found.update(shares)
        return found


def follow_events(upstreams: Sequence[Upstream], tasks: BackgroundTasks) -> Mapping[str, EngineBlocks]:
    """Begins to follow the events of the upstreams with the setting `kv_events`; their blocks by their names.

    Raises SettingsError where the extra is not installed.
    """
    return dict(_followed(upstreams, tasks))


def _followed(upstreams: Sequence[Upstream], tasks: BackgroundTasks) -> Iterator[tuple[str, EngineBlocks]]:
    for upstream in upstreams:
        if (address := upstream.settings.kv_events) is None:
            continue
        if importlib.util.find_spec("zmq") is None:
            raise SettingsError(
                f"upstreams: {upstream.name}: kv_events: not installed; install the extra: pip install"
                " 'keepgate[kv-events]'"
            )
        from gateway.routing.prefixes.kv_subscription import Subscription  # pyzmq, only where it is needed

        subscription = Subscription(address)
        tasks.keep(subscription.follow)
        yield upstream.name, subscription.blocks
