"""Vectors of texts for an event loop: one call at a time computes, and texts that come meanwhile are its next batch."""

import asyncio
import bisect
import itertools
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import NamedTuple

import numpy as np

from cache.semantic.embedding.encoder import Encoder, Vector, Vectors
from cache.semantic.embedding.errors import EmbeddingFailed
from cache.semantic.embedding.server import EmbeddingServer, ServerModel, open_models
from cache.stores.breaker import Breaker

MAX_WAITING = 1024
"""Texts in the queue, with any patience."""
MAX_TOKENS = 256
"""Of one call, by the length of its texts: later texts wait for the whole call."""
_CHARACTERS_OF_TOKEN = 4
_YIELD_OF_TOKEN = 1e-3
"""Seconds by which a shorter text may come later and go first, for each token that it has less."""

# Weight of the newest call in the mean time of a text.
_NEWEST = 0.1

_NICE = 10
_BACKGROUND_DEADLINE = 10.0


class ThreadModel:
    """An encoder of this process, in a thread of its own: as a `ServerModel` whose breaker never opens."""

    failures = 0

    def __init__(self, encoder: Encoder, patient: bool) -> None:
        self.name, self.fingerprint, self.dimensions = encoder.name, encoder.fingerprint, encoder.dimensions
        self.breaker = Breaker(encoder.name, lambda: asyncio.sleep(0), (), math.inf)
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(1, "embedder", _yield_to_others if patient else None)

    async def encode(self, texts: list[str]) -> Vectors:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.encode, texts)

    async def close(self) -> None:
        """Let a running call end."""
        await asyncio.to_thread(self._thread.shutdown)


def _yield_to_others() -> None:
    """Gives this thread a tenth of the others' share of a busy processor."""
    if sys.platform == "linux":  # where threads have their own priorities
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)


class _Waiting:
    """A queued text and the caller that waits for its vector."""

    def __init__(self, text: str) -> None:
        loop = asyncio.get_running_loop()
        self.text = text
        self.vector: asyncio.Future[Vector] = loop.create_future()
        # A longer text is truncated, by most models.
        self.tokens = min(MAX_TOKENS, len(text) // _CHARACTERS_OF_TOKEN + 2)
        # The lowest rank goes first: earlier before later, short before long, without starvation.
        self.rank = loop.time() + self.tokens * _YIELD_OF_TOKEN


class Embedder:
    """Embeds texts one batch after the other; use it through `open_embedder`.

        calls    │ a │ b c d │ e │
        texts    a b c d     e

    Only the event loop that opened it may use it. A vector depends on its text alone, but for its last bits.
    """

    def __init__(self, model: ThreadModel | ServerModel, patience: float) -> None:
        self.model = model
        self.texts = 0
        """Computed so far."""
        self.calls = 0
        """Of the model, so far: texts / calls is the mean size of a batch."""
        self._waiting: list[_Waiting] = []
        self._under_way: list[_Waiting] = []
        self._began = math.inf
        self._patience = patience
        self._text_seconds = 0.0
        self._wake = asyncio.Event()
        self._worker = asyncio.create_task(self._work(), name="embedder")

    @property
    def seconds_under_way(self) -> float:
        """Seconds since the running call began; negative if there is none."""
        # The clock of uvloop's loop has a resolution of a millisecond, in which a short text is computed.
        return time.monotonic() - self._began

    async def embed(self, text: str) -> Vector:
        """The unit vector of a text, float32 [dimensions].

        Raises EmbeddingFailed if the model gives no vector, and at once if it is known to be unavailable or the text
        would not be in time. A cancelled caller costs nothing more: a text is computed only if a caller still waits.
        """
        if self._worker.done():
            raise EmbeddingFailed("the embedder is closed")
        if self.model.breaker.is_open:
            raise EmbeddingFailed(f"{self.model.name} is unavailable")
        self._forget_who_left()
        ahead = len(self._waiting) + len(self._under_way)
        wait = max(ahead * self._text_seconds, self.seconds_under_way)
        if len(self._waiting) >= MAX_WAITING or wait > self._patience:
            raise EmbeddingFailed("the embedding model is busy: this text would not be embedded in time")
        waiting = _Waiting(text)
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.vector

    async def _work(self) -> None:
        """Computes waiting texts; runs while the embedder is open."""
        while True:
            await self._wake.wait()
            self._forget_who_left()
            self._waiting.sort(key=lambda each: each.rank)
            tokens = list(itertools.accumulate(each.tokens for each in self._waiting))
            count = max(1, bisect.bisect_right(tokens, MAX_TOKENS))
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
            if batch:
                await self._compute(batch)
            if not self._waiting:
                self._wake.clear()

    async def aclose(self) -> None:
        """Let the running call end; callers that still wait get EmbeddingFailed."""
        self._worker.cancel()
        await asyncio.wait([self._worker])
        _fail(self._under_way + self._waiting, EmbeddingFailed("the embedder is closed"))
        await self.model.close()

    def _forget_who_left(self) -> None:
        self._waiting = [each for each in self._waiting if not each.vector.done()]

    async def _compute(self, batch: list[_Waiting]) -> None:
        self.calls += 1
        self.texts += len(batch)
        self._under_way, self._began = batch, time.monotonic()
        try:
            vectors = await self.model.encode([each.text for each in batch])
            found = list(zip(batch, vectors, strict=True))
        except Exception as error:  # noqa: BLE001  Runtimes raise any exception; each caller gets it.
            failure = EmbeddingFailed(f"the embedding model failed: {type(error).__name__}")
            failure.__cause__ = error
            _fail(batch, error if isinstance(error, EmbeddingFailed) else failure)
        else:
            for each, vector in found:
                if not np.isfinite(vector).all():
                    _fail([each], EmbeddingFailed("the embedding model gives no direction for this text"))
                elif not each.vector.done():
                    # A copy: a row would keep the vectors of the whole batch.
                    each.vector.set_result(vector.copy())
        self._text_seconds += _NEWEST * (self.seconds_under_way / len(batch) - self._text_seconds)
        self._under_way, self._began = [], math.inf


def _fail(batch: list[_Waiting], error: EmbeddingFailed) -> None:
    """Each caller gets the error, and none of them the text of another."""
    for each in batch:
        if not each.vector.done():
            each.vector.set_exception(error)


def open_embedder(
    model: Encoder | ServerModel, patient: bool = False, patience: float = math.inf
) -> aclosing[Embedder]:
    """An embedder that works until the block ends. A text that would wait more than `patience` seconds is refused.

    A `patient` one is for background work: the thread of an encoder has a low priority, so that its texts, which may
    take fifty milliseconds and cannot be interrupted, do not delay other embedders.
    """
    return aclosing(Embedder(model if isinstance(model, ServerModel) else ThreadModel(model, patient), patience))


class Embedders(NamedTuple):
    """One whose texts somebody waits for, and one for work in the background, both of one model.

    Use them while the `watch` of their breakers run.
    """

    lookups: Embedder
    background: Embedder

    def figures(self) -> dict[str, object]:
        """For display; `failures` are calls of a server."""
        return {
            "available": not self.lookups.model.breaker.is_open,
            "dimensions": self.lookups.model.dimensions,
            "texts": sum(each.texts for each in self),
            "calls": sum(each.calls for each in self),
            "failures": sum(each.model.failures for each in self),
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
        models: list[Encoder] | list[ServerModel]
        if isinstance(source, EmbeddingServer):
            models = await stack.enter_async_context(open_models(source, (deadline, _BACKGROUND_DEADLINE)))
        else:
            models = [await asyncio.to_thread(source)] * 2
        lookups = await stack.enter_async_context(open_embedder(models[0], patience=patience))
        background = await stack.enter_async_context(open_embedder(models[1], patient=True))
        yield Embedders(lookups, background)
