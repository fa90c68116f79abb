"""Looks whether a restored prefix is what the model computes: one in N is computed again, and logits are compared."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backend.engine.async_engine import AsyncEngine
from backend.engine.kv_connector import StoredPrefix
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, Sequence
from backend.errors import RequestError
from backend.requests.generation_request import SequenceFactory

logger = logging.getLogger(__name__)

_SECONDS = 60.0
_MAX_ERROR = 0.01
"""Relative error of logits up to which two computations of one thing count as the same, where rounding may differ."""
_MAX_DIVERGENCE = 0.1
"""The same for blocks that were stored with a loss: nats between the distributions of the next token."""


@dataclass(slots=True)
class AuditFigures:
    """What was found so far."""

    audited: int = 0
    void: int = 0
    """Could not be compared: the blocks had gone by then, or the engine had no time."""
    drifted: int = 0
    """Were not what the model computes, and have been removed since."""
    largest_error: float = 0.0
    """Largest difference of logits, relative to the largest logit."""
    largest_divergence: float = 0.0
    """Nats: from the distribution after the computed prefix to that after the restored one."""


class PrefixAuditor:
    """Has an idle engine compute restored prefixes again.

    Args:
        every: one in so many restored prefixes is audited; 0: none.
        distrust: called where a prefix has drifted, to remove it from wherever it is kept.
    """

    def __init__(
        self,
        every: int,
        engine: AsyncEngine,
        sequences: SequenceFactory,
        start_new_epoch: Callable[[StoredPrefix], Awaitable[None]],
    ) -> None:
        self.figures = AuditFigures()
        self._every = every
        self._engine = engine
        self._sequences = sequences
        self._remove_suspect_prefix = start_new_epoch
        self._restored = 0
        self._is_busy = False

    def is_due(self) -> bool:
        """Whether the prefix that was restored now is one in N; one at a time is looked at."""
        self._restored += 1
        return bool(self._every) and self._restored % self._every == 0 and not self._is_busy

    async def audit(self, sequence: Sequence, prefix: StoredPrefix) -> None:
        """Compares a restored prefix of a sequence with what is computed."""
        self._is_busy = True
        try:
            await self._audit(sequence, prefix)
        finally:
            self._is_busy = False

    async def _audit(self, sequence: Sequence, prefix: StoredPrefix) -> None:
        tokens = sequence.tokens[: prefix.restored * BLOCK_SIZE + 1]
        probes = [self._sequences.probe(tokens, sequence.keys, kind) for kind in ("shared", "fresh")]
        for probe in probes:
            probe.deadline = time.monotonic() + _SECONDS
        try:
            shared, fresh = await self._run(probes)
        except RequestError:  # it has too much to do, or ends
            self.figures.void += 1
            return
        if shared is None or fresh is None or fresh.logits is None or shared.cached_tokens < len(tokens) - 1:
            self.figures.void += 1
        elif shared.logits is not None:
            await self._compare(shared.logits, fresh.logits, prefix)
        elif shared.finish_reason is FinishReason.FAILED:  # they led to values that are not numbers
            await self._compare(np.full_like(fresh.logits, np.nan), fresh.logits, prefix)

    async def _run(self, probes: list[Sequence]) -> list[Output | None]:
        """The last output of each, None where it has none."""
        last: list[Output | None] = [None] * len(probes)
        generation = self._engine.submit(probes)
        try:
            while generation.unfinished:
                for index, output in await generation.take():
                    last[index] = output
        finally:
            self._engine.release(probes, generation)
        return last

    async def _compare(
        self, restored: npt.NDArray[np.float32], computed: npt.NDArray[np.float32], prefix: StoredPrefix
    ) -> None:
        error = float(np.abs(restored - computed).max() / np.abs(computed).max())
        divergence = _divergence(computed, restored)
        figures = self.figures
        figures.audited += 1
        figures.largest_error = max(figures.largest_error, error)
        figures.largest_divergence = max(figures.largest_divergence, divergence)
        most = 0.0 if self._engine.engine.runner.deterministic else _MAX_ERROR
        # What was restored bit by bit may have been evicted since, and found again in a form that was not.
        may_restore_lossy = prefix.lossy or self._engine.engine.may_restore_lossy
        if not (divergence <= _MAX_DIVERGENCE if may_restore_lossy else error <= most):
            logger.error(
                "a restored prefix of %d tokens is not what the model computes: logits differ by %.3g of the largest, "
                "%.3g nats; it is removed",
                *(prefix.restored * BLOCK_SIZE, error, divergence),
            )
            try:
                await self._remove_suspect_prefix(prefix)
            finally:
                figures.drifted += 1


def _divergence(computed: npt.NDArray[np.float32], restored: npt.NDArray[np.float32]) -> float:
    """Kullback-Leibler divergence in nats, infinite where a token has become impossible."""
    one, other = (_log_softmax(logits.astype(np.float64)) for logits in (computed, restored))
    found = one > -math.inf
    return float((np.exp(one[found]) * (one[found] - other[found])).sum())


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    normalised: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised
