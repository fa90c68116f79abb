"""Lookups whose answer is still to come, or may still be judged wrong."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from cache.semantic.inspection.decisions import WatchedDecision
from cache.semantic.policy.policy import Decision, Evidence, Label, Source, label_of

_MOST = 4096
REGENERATE_SECONDS = 10.0
"""A repeat within this time counts as a rejection of the served answer."""

K = TypeVar("K")
V = TypeVar("V")


class Latest(OrderedDict[K, V]):
    """The items that were set last; the oldest are dropped when there are too many."""

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > _MOST:
            self.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Query:
    """A question, and what was decided of the answer of `entry`; `served` says whether it went to the client.

    Without `evidence` nothing is to be learned: no neighbour could have been served, or the request had a threshold of
    its own, or it was the same question in another spelling, which needs no `decision` and no `vector` either.
    """

    key: str
    partition: str
    text: str
    entry: str
    served: bool
    vector: npt.NDArray[np.float32] | None = None
    evidence: Evidence | None = None
    decision: Decision | None = None
    watched: WatchedDecision | None = None
    time: float = field(default_factory=time.monotonic)
    """Monotonic seconds."""

    @property
    def is_audit(self) -> bool:
        """Whether the upstream is asked although the answer could be served."""
        return self.decision is not None and self.decision.audit

    @property
    def was_just_served(self) -> bool:
        return time.monotonic() - self.time <= REGENERATE_SECONDS

    def label(self, same: bool, source: Source) -> Label | None:
        """The judgement of the answer that was, or would have been, served; None if there is nothing to learn."""
        if self.evidence is None or self.decision is None:
            return None
        return label_of(self.evidence, self.decision, same, source)
