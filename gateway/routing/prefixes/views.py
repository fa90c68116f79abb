"""What upstreams say themselves of the KV blocks that they hold."""

import asyncio
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeGuard

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
    """A view from KV cache events. These are of tokens: an upstream that publishes them is asked for the prompt's.

    Says nothing of a prompt that no upstream holds: it may have other tokens than the upstream told.
    """

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
        if asked is None or not _are_of_tokens(prompt, asked, known.values()):
            return {}
        tokens = prompt.fields.get("prompt")
        if not _are_tokens(tokens):
            tokens = (await self._asker.ask(asked, _TOKENIZE_PATH, prompt) or {}).get("tokens")
        if not _are_tokens(tokens):
            return {}
        leading = {name: blocks.leading(tokens) for name, blocks in known.items()}
        if not any(leading.values()):
            return {}
        # Where events were missed, no block means nothing.
        return {name: count / len(tokens) for name, count in leading.items() if count or known[name].is_whole}


def _are_of_tokens(prompt: Prompt, upstream: Upstream, known: Iterable[EngineBlocks]) -> bool:
    """Whether the blocks of a prompt are those of its tokens alone, without a salt and an adapter."""
    model = str(prompt.fields.get("model"))
    adapter = upstream.settings.models.get(model, model)
    return not prompt.fields.get("cache_salt") and not any(adapter in blocks.adapters for blocks in known)


def _are_tokens(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(token) is int and 0 <= token < 2**32 for token in value)


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

    def published(self, upstream: str) -> int | None:
        """How many blocks an upstream is known to hold by its KV cache events; None where it is to publish none."""
        blocks = self._published.get(upstream)
        return None if blocks is None else len(blocks)

    async def held(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        """For `RouteRequest.held`, within 20 ms. What events say counts before what an index says."""
        if not self.may_know(upstreams):
            return {}
        found: dict[str, float] = {}
        for shares in await asyncio.gather(*(view.shares(upstreams, prompt) for view in self._views)):
            found.update(shares)
        return found


class EventFollower:
    """Follows the KV cache events of the upstreams that publish them. `blocks` are theirs, by their names."""

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks
        self._following: dict[Upstream, asyncio.Task[None]] = {}
        self.blocks: dict[str, EngineBlocks] = {}

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
            address = upstream.settings.kv_events
            if address is None or upstream in self._following:
                continue
            from gateway.routing.prefixes.kv_subscription import Subscription  # pyzmq, only where it is needed

            subscription = Subscription(address)
            self._following[upstream] = self._tasks.keep(subscription.follow)
            self.blocks[upstream.name] = subscription.blocks
