"""What the prefix stores of engines say: `POST /v1/prefix/lookup`, which the in-repo engine has."""

import asyncio
from collections.abc import Mapping, Sequence

from gateway.routing.prefixes.asking import Asker, Prompt
from gateway.upstreams.upstream import Upstream

LOOKUP_PATH = "/v1/prefix/lookup"
"""To be probed, so that `Upstream.has` tells which upstreams have it."""


class EngineIndex:
    """Asks each upstream that has an index, all at the same time."""

    def __init__(self, asker: Asker) -> None:
        self._asker = asker

    async def shares(self, upstreams: Sequence[Upstream], prompt: Prompt) -> Mapping[str, float]:
        """The leading share of the prompt that upstreams hold, by their names; without those that do not say."""
        asked = [upstream for upstream in upstreams if LOOKUP_PATH in upstream.has]
        replies = await asyncio.gather(*(self._share(upstream, prompt) for upstream in asked))
        return {upstream.name: share for upstream, share in zip(asked, replies, strict=True) if share is not None}

    async def _share(self, upstream: Upstream, prompt: Prompt) -> float | None:
        reply = await self._asker.ask(upstream, LOOKUP_PATH, prompt)
        if reply is None:
            return None
        tokens, leading = reply.get("tokens"), reply.get("leading_tokens")
        if not isinstance(tokens, int) or tokens < 1 or not isinstance(leading, dict):
            return None
        # Each tier holds a beginning; blocks of several make one.
        held = max((count for count in leading.values() if isinstance(count, int)), default=0)
        return min(1.0, max(0.0, held / tokens))
