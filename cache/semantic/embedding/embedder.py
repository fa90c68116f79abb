"""Vectors of texts for an event loop: one call at a time computes, and texts that come meanwhile are its next batch."""

import asyncio
import bisect
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.encoder import Encoder, Vectors
from cache.semantic.embedding.errors import EmbedderBusy, EmbeddingError, EmbeddingFailed

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


class Model(Protocol):
    """An embedding model, wherever it is computed. The embedder calls it once at a time."""

    name: str
    """Of the model and of its runtime, for display."""
    fingerprint: str
    """Vectors of different fingerprints must never be compared."""
    dimensions: int
    failures: int
    """Calls without a result, so far."""

    @property
    def is_available(self) -> bool:
        """False while it is known that a call would fail."""
        ...

    async def wait_available(self) -> None: ...

    async def encode(self, texts: list[str]) -> Vectors:
        """As `Encoder.encode`."""
        ...

    async def close(self) -> None:
        """Let a running call end."""
        ...


class _InThread:
    """An encoder of this process, in a thread of its own."""

    def __init__(self, encoder: Encoder, patient: bool) -> None:
        self.name, self.fingerprint, self.dimensions = encoder.name, encoder.fingerprint, encoder.dimensions
        self.failures = 0
        self.is_available = True
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="embedder", initializer=_yield_to_others if patient else None
        )

    async def wait_available(self) -> None:
        return

    async def encode(self, texts: list[str]) -> Vectors:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.encode, texts)

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)


class _Waiting:
    """A queued text and the callers that wait for its vector."""

    def __init__(self, text: str, came: float, vector: "asyncio.Future[npt.NDArray[np.float32]]") -> None:
        self.text = text
        self.vector = vector
        # A longer text is truncated, by most models.
        self.tokens = min(MAX_TOKENS, len(text) // _CHARACTERS_OF_TOKEN + 2)
        # The lowest rank goes first: earlier before later, short before long, without starvation.
        self.rank = came + self.tokens * _YIELD_OF_TOKEN


class Embedder:
    """Embeds texts one batch after the other; use it through `open_embedder`.

        calls    │ a │ b c d │ e │
        texts    a b c d     e

    Only the event loop that opened it may use it. A vector depends on its text alone, but for its last bits.
    """

    def __init__(self, model: Model, patience: float) -> None:
        self.model = model
        self.texts = 0
        """Computed so far."""
        self.calls = 0
        """Of the model, so far: texts / calls is the mean size of a batch."""
        self._waiting: list[_Waiting] = []
        self._under_way = 0
        self._began = math.inf
        self._patience = patience
        self._text_seconds = 0.0
        self._closed = False
        self._wake = asyncio.Event()

    @property
    def seconds_under_way(self) -> float:
        """Seconds since the running call began; negative if there is none."""
        # The clock of uvloop's loop has a resolution of a millisecond, in which a short text is computed.
        return time.monotonic() - self._began

    async def embed(self, text: str) -> npt.NDArray[np.float32]:
        """The unit vector of a text, float32 [dimensions].

        Raises EmbedderBusy at once if it would not be in time, and EmbeddingFailed if the model gives no vector or is
        known to be unavailable. A cancelled caller costs nothing more: a text is computed only if a caller still waits.
        """
        if self._closed:
            raise EmbeddingFailed("the embedder is closed")
        if not self.model.is_available:
            raise EmbeddingFailed(f"{self.model.name} is unavailable")
        if self._is_busy():
            self._forget_who_left()
        if self._is_busy():
            raise EmbedderBusy("the embedding model is busy: this text would not be embedded in time")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(text, loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.vector

    async def work(self) -> None:
        """Computes waiting texts; runs while the embedder is open."""
        while True:
            await self._wake.wait()
            self._forget_who_left()
            if batch := self._next_batch():
                await self._compute(batch)
            if not self._waiting:
                self._wake.clear()

    async def close(self) -> None:
        """Let the running call end; callers that still wait get EmbeddingFailed."""
        self._closed = True
        _fail(self._waiting, EmbeddingFailed("the embedder is closed"))
        self._waiting.clear()
        await self.model.close()

    def _is_busy(self) -> bool:
        wait = max((len(self._waiting) + self._under_way) * self._text_seconds, self.seconds_under_way)
        return len(self._waiting) >= MAX_WAITING or wait > self._patience

    def _forget_who_left(self) -> None:
        self._waiting = [each for each in self._waiting if not each.vector.done()]

    def _next_batch(self) -> list[_Waiting]:
        """Take the texts of the next call from those that wait."""
        self._waiting.sort(key=lambda each: each.rank)
        tokens = list(itertools.accumulate(each.tokens for each in self._waiting))
        count = max(1, bisect.bisect_right(tokens, MAX_TOKENS))
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _compute(self, batch: list[_Waiting]) -> None:
        self.calls += 1
        self.texts += len(batch)
        self._under_way = len(batch)
        self._began = time.monotonic()
        try:
            vectors = await self.model.encode([each.text for each in batch])
            found = list(zip(batch, vectors, strict=True))
        except asyncio.CancelledError:
            _fail(batch, EmbeddingFailed("the embedder is closed"))
            raise
        except EmbeddingError as error:
            _fail(batch, EmbeddingFailed(str(error)), error)
        except Exception as error:  # noqa: BLE001  Runtimes raise any exception; each caller gets it.
            _fail(batch, EmbeddingFailed(f"the embedding model failed: {type(error).__name__}"), error)
        else:
            for each, vector in found:
                if not np.isfinite(vector).all():
                    _fail([each], EmbeddingFailed("the embedding model gives no direction for this text"))
                elif not each.vector.done():
                    # A copy: a row would keep the vectors of the whole batch.
                    each.vector.set_result(vector.copy())
        self._text_seconds += _NEWEST * (self.seconds_under_way / len(batch) - self._text_seconds)
        self._under_way, self._began = 0, math.inf


@asynccontextmanager
async def open_embedder(encoder: Encoder, patient: bool = False, patience: float = math.inf) -> AsyncIterator[Embedder]:
    """An embedder that works until the block ends. A text that would wait more than `patience` seconds is refused.

    A `patient` one is for background work: its thread has a low priority, so that its texts, which may take fifty
    milliseconds and cannot be interrupted, do not delay other embedders.
    """
    async with open_model(_InThread(encoder, patient), patience) as embedder:
        yield embedder


@asynccontextmanager
async def open_model(model: Model, patience: float = math.inf) -> AsyncIterator[Embedder]:
    """As `open_embedder`, for a model wherever it is computed."""
    embedder = Embedder(model, patience)
    worker = asyncio.create_task(embedder.work(), name="embedder")
    try:
        yield embedder
    finally:
        worker.cancel()
        await asyncio.wait([worker])
        await embedder.close()


def _yield_to_others() -> None:
    """Gives this thread a tenth of the others' share of a busy processor."""
    if sys.platform == "linux":  # where threads have their own priorities
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _fail(batch: list[_Waiting], error: EmbeddingFailed, cause: Exception | None = None) -> None:
    """Each caller gets the error, and none of them the text of another."""
    error.__cause__ = cause
    for each in batch:
        if not each.vector.done():
            each.vector.set_exception(error)
