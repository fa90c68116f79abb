"""The embedders of a process: one whose texts somebody waits for, and one for work in the background."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import aiohttp

from cache.semantic.embedding.embedder import Embedder, open_embedder, open_model
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.server import EmbeddingServer, ServerModel, first_vector

_BACKGROUND_DEADLINE = 10.0
# Longer than a quiet gateway is without a question: a new connection may take longer than a lookup has.
_IDLE_CONNECTION_SECONDS = 300.0


class Embedders(NamedTuple):
    """Both are of one model. `watches` must run while they are used."""

    lookups: Embedder
    background: Embedder
    watches: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()

    def figures(self) -> dict[str, object]:
        """For display; `failures` are calls of a server."""
        return {
            "available": self.lookups.model.is_available,
            "dimensions": self.lookups.model.dimensions,
            "texts": self.lookups.texts + self.background.texts,
            "calls": self.lookups.calls + self.background.calls,
            "failures": self.lookups.model.failures + self.background.model.failures,
        }


@asynccontextmanager
async def open_embedders(
    source: EmbeddingServer | Callable[[], Encoder], patience: float, deadline: float
) -> AsyncIterator[Embedders]:
    """Waits until the model is there: `source` is its server, or blocks until it has loaded it.

    Args:
        patience: seconds that a text of a lookup may wait; others are refused at once.
        deadline: seconds after which a server is given up, for a lookup.
    """
    async with AsyncExitStack() as stack:
        if not isinstance(source, EmbeddingServer):
            encoder = await asyncio.to_thread(source)
            lookups = await stack.enter_async_context(open_embedder(encoder, patience=patience))
            background = await stack.enter_async_context(open_embedder(encoder, patient=True))
            yield Embedders(lookups, background)
            return
        connector = aiohttp.TCPConnector(keepalive_timeout=_IDLE_CONNECTION_SECONDS)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        vector = await first_vector(session, source, _BACKGROUND_DEADLINE)
        quick, slow = (ServerModel(session, source, vector, each) for each in (deadline, _BACKGROUND_DEADLINE))
        lookups = await stack.enter_async_context(open_model(quick, patience))
        background = await stack.enter_async_context(open_model(slow))
        yield Embedders(lookups, background, (quick.breaker.watch, slow.breaker.watch))
