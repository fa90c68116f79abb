"""What upstreams say themselves of the KV blocks that they hold."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.routing.prefixes.asking import TOKENIZE_PATH, Asker, Prompt, are_tokens
from gateway.routing.prefixes.engine_index import LOOKUP_PATH, EngineIndex
from gateway.tenants.credentials import NAMESPACE_HEADER
from gateway.upstreams.upstream import Upstream


class PrefixView(Protocol):
    """A way to know what upstreams hold."""

    async def shares(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        """The leading share of the prompt, from 0 to 1, that upstreams hold, by their names; without those of which it
        is not known. Raises nothing, and takes no longer than an `Asker` does.
        """


class HeldBlocks(Protocol):
    """What is known of the blocks of an upstream by its events."""

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are known."""

    @property
    def adapters(self) -> set[str]:
        """Names of models whose blocks are not known: LoRA adapters."""

    def __len__(self) -> int: ...

    def leading(self, tokens: Sequence[int], salt: str | None = None) -> float:
        """How many leading tokens of a prompt it holds, for requests with this salt."""


class PublishedBlocks:
    """A view from KV cache events. These are of tokens: an upstream that publishes them is asked for the prompt's.

    Says nothing of a prompt that no upstream holds: it may have other tokens than the upstream told.
    """

    def __init__(self, asker: Asker, blocks: Mapping[str, HeldBlocks]) -> None:
        """`blocks` are those of each upstream that publishes, by its name."""
        self._asker = asker
        self._blocks = blocks

    async def shares(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        known = {
            upstream: blocks
            for upstream in upstreams
            if (blocks := self._blocks.get(upstream.name)) is not None and len(blocks)
        }
        if any(_is_of_adapter(prompt, upstream, blocks) for upstream, blocks in known.items()):
            return {}
        tokens = prompt.fields.get("prompt") if are_tokens(prompt.fields.get("prompt")) else None
        # All have the same model, and so the same tokens.
        asked = [upstream for upstream in known if self._asker.may_ask(upstream)]
        if tokens is None and asked:
            least_busy = min(asked, key=lambda upstream: upstream.in_flight)
            tokens = (await self._asker.ask(least_busy, TOKENIZE_PATH, prompt) or {}).get("tokens")
        if not are_tokens(tokens):
            return {}
        leading = {upstream: blocks.leading(tokens, _salt(prompt, upstream)) for upstream, blocks in known.items()}
        if not any(leading.values()):
            return {}
        # Where events were missed, no block means nothing.
        return {each.name: count / len(tokens) for each, count in leading.items() if count or known[each].is_whole}


def _is_of_adapter(prompt: Prompt, upstream: Upstream, blocks: HeldBlocks) -> bool:
    """Whether the blocks of a prompt are not those of its tokens, but of a LoRA adapter."""
    model = str(prompt.fields.get("model"))
    return upstream.settings.models.get(model, model) in blocks.adapters


def _salt(prompt: Prompt, upstream: Upstream) -> str | None:
    """The salt that a request with this prompt has at the upstream."""
    return upstream.salt(prompt.own.get(NAMESPACE_HEADER, ""), prompt.fields.get("cache_salt"))


class PrefixViews:
    """All views as one."""

    def __init__(self, published: Mapping[str, HeldBlocks]) -> None:
        self._published = published
        self._views: tuple[PrefixView, ...] = (
            EngineIndex(Asker()),
            PublishedBlocks(Asker(), published),
        )

    def may_know(self, upstreams: Sequence[Upstream]) -> bool:
        """Whether asking can be of use: some upstream has an index or publishes events."""
        return any(LOOKUP_PATH in upstream.has or upstream.name in self._published for upstream in upstreams)

    def published(self, upstream: str) -> int | None:
        """How many blocks an upstream is known to hold by its KV cache events; None where it is to publish none."""
        blocks = self._published.get(upstream)
        return None if blocks is None else len(blocks)

    async def held(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        """For `RouteRequest.held`, in the time of an `Asker`. What events say counts before what an index says."""
        if not self.may_know(upstreams):
            return {}
        found: dict[str, float] = {}
        for shares in await asyncio.gather(*(view.shares(upstreams, prompt) for view in self._views)):
            found.update(shares)
        return found
