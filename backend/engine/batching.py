"""When waiting sequences may join the batch: at any step, or only in batches that form and end together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BatchingMode(Enum):
    """How batches form."""

    CONTINUOUS = "continuous"
    """Sequences join and leave between any two steps (iteration-level scheduling: Orca, OSDI 2022)."""
    DYNAMIC = "dynamic"
    """A batch begins when it is full, or when its first sequence has waited long enough; nobody joins it later."""
    STATIC = "static"
    """A batch takes what is waiting when the last one has ended; nobody joins it later."""


@dataclass(frozen=True, slots=True)
class Batching:
    """The rule by which waiting sequences join."""

    mode: BatchingMode = BatchingMode.CONTINUOUS
    max_wait: float = 0.0
    """Seconds for which a dynamic batch waits to be full."""

    @property
    def joins_late(self) -> bool:
        """Whether a sequence that does not join now may still join while others run."""
        return self.mode is BatchingMode.CONTINUOUS

    def opens_in(self, running: int, waiting: int, waited: float, max_batch: int) -> float | None:
        """Seconds until waiting sequences may join; 0: now, None: not before something else happens.

        Args:
            running: sequences in the batch.
            waiting: sequences queued, at least 1.
            waited: seconds for which the first of them has been queued.
        """
        if self.joins_late:
            return 0.0
        if running:
            return None
        if self.mode is BatchingMode.STATIC or waiting >= max_batch:
            return 0.0
        return max(0.0, self.max_wait - waited)
