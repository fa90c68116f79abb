"""Queries whose answer has not been reported yet, and served answers that may still be judged wrong."""

import itertools
import secrets
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.semantic.inspection.decisions import WatchedDecision
from cache.semantic.policy.label import Label, Source
from cache.semantic.policy.policy import Decision, Evidence

_MAX_OPEN = 4096
_MAX_SERVED = 4096
REGENERATE_SECONDS = 10.0
"""A repeat within this time counts as a rejection of the served answer."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question and the evidence of its neighbours. Without `evidence` none of them could have been served."""

    key: str
    partition: str
    text: str
    vector: npt.NDArray[np.float32]
    evidence: Evidence | None
    entry: str
    decision: Decision
    served: bool
    watched: WatchedDecision | None = None

    def label(self, same: bool) -> Label:
        """The label of the answer that was, or would have been, served."""
        assert self.evidence is not None  # noqa: S101  # else there is nothing to judge
        decision = self.decision
        if not decision.serve or (self.served and not decision.audit):  # the latter: it could not be served after all
            return _label(self.evidence, decision, same, "miss", 1.0)
        return _label(self.evidence, decision, same, "audit", decision.audit_chance)


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer that was served for a similar question, at `time` in monotonic seconds.

    Without `evidence` it was the same question in another spelling, without a decision of the policy.
    """

    key: str
    entry: str
    time: float
    evidence: Evidence | None = None
    decision: Decision | None = None
    watched: WatchedDecision | None = None

    def label(self) -> Label | None:
        """The label of a rejection by the user; None if the policy made no decision."""
        if self.evidence is None or self.decision is None:
            return None
        return _label(self.evidence, self.decision, False, "user", self.decision.audit_chance)


def _label(evidence: Evidence, decision: Decision, same: bool, source: Source, chance: float) -> Label:
    features = tuple(evidence.features.tolist())
    risk = decision.plain_risk
    return Label(evidence.entry, evidence.similarity, features, same, source, risk, chance, evidence.answer)


class OpenQueries:
    """Open queries, by number; the oldest are dropped when too many are open."""

    def __init__(self) -> None:
        # Not from 1: an answer that is reported to the next process must not match another question.
        self._numbers = itertools.count(secrets.randbits(62) + 1)
        self._open: OrderedDict[int, Query] = OrderedDict()

    def open(self, query: Query) -> int:
        number = next(self._numbers)
        self._open[number] = query
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)
        return number

    def close(self, number: int, partition: str, text: str) -> Query | None:
        """The query of this number, if it is of this question."""
        query = self._open.pop(number, None)
        return query if query is not None and (query.partition, query.text) == (partition, text) else None


class ServedAnswers:
    """The answers served lately and not yet judged by their users, and the rejected ones."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, ServedAnswer] = OrderedDict()
        self._rejected: OrderedDict[str, None] = OrderedDict()

    def note(self, served_answer: ServedAnswer) -> None:
        self._by_key.pop(served_answer.key, None)
        self._by_key[served_answer.key] = served_answer
        if len(self._by_key) > _MAX_SERVED:
            self._by_key.popitem(last=False)

    def take(self, key: str) -> ServedAnswer | None:
        return self._by_key.pop(key, None)

    def reject(self, key: str) -> None:
        """This question got a wrong answer: it gets no answer of another question until it has one of its own."""
        self._rejected[key] = None
        if len(self._rejected) > _MAX_SERVED:
            self._rejected.popitem(last=False)

    def has_rejected(self, key: str) -> bool:
        return key in self._rejected

    def accept(self, key: str) -> None:
        """The question has an answer of its own."""
        self._rejected.pop(key, None)

    def take_repeated(self, key: str, now: float) -> ServedAnswer | None:
        """The served answer that this repeat rejects, if any."""
        served_answer = self._by_key.get(key)
        return self.take(key) if served_answer is not None and now - served_answer.time <= REGENERATE_SECONDS else None

    def take_latest_of(self, entry: str) -> ServedAnswer | None:
        """The last served answer from an entry: the one that a user rejects."""
        key = next((key for key, served_answer in reversed(self._by_key.items()) if served_answer.entry == entry), None)
        return None if key is None else self._by_key.pop(key)
