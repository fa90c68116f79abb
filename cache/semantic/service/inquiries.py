"""What was asked and not yet answered, and what was served and may yet turn out wrong."""

import itertools
import secrets
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cache.semantic.policy.label import Label, Source
from cache.semantic.policy.policy import Decision, Evidence

_MOST_OPEN = 4096
_MOST_SERVED = 4096
REGENERATE_SECONDS = 10.0
"""Who asks the same again so soon was not content."""


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question and what its neighbours said. Without `evidence` none of them could have been served."""

    key: str
    partition: str
    text: str
    vector: npt.NDArray[np.float32]
    evidence: Evidence | None
    entry: str
    decision: Decision
    served: bool

    def label(self, same: bool) -> Label:
        """What the fresh answer says of the one that was, or would have been, served."""
        assert self.evidence is not None  # noqa: S101  # else there is nothing to judge
        decision = self.decision
        if not decision.serve or (self.served and not decision.audit):  # the latter: it could not be served after all
            return _label(self.evidence, decision, same, "miss", 1.0)
        return _label(self.evidence, decision, same, "audit", decision.audit_chance)


@dataclass(frozen=True, slots=True)
class Serving:
    """An answer that was served for another question than its own, at `time` in monotonic seconds.

    Without `evidence` it was the same question, written differently, and nobody decided.
    """

    key: str
    entry: str
    time: float
    evidence: Evidence | None = None
    decision: Decision | None = None

    def label(self) -> Label | None:
        """That it was wrong, as somebody says who got it; None where there is nothing to learn by it."""
        if self.evidence is None or self.decision is None:
            return None
        return _label(self.evidence, self.decision, False, "user", self.decision.audit_chance)


def _label(evidence: Evidence, decision: Decision, same: bool, source: Source, chance: float) -> Label:
    features = tuple(evidence.features.tolist())
    risk = decision.plain_risk
    return Label(evidence.entry, evidence.similarity, features, same, source, risk, chance, evidence.answer)


class Inquiries:
    """Open questions, by number; the oldest are forgotten when nobody says how they ended."""

    def __init__(self) -> None:
        # Not from 1: an answer that is told to the next process must not be taken for that to another question.
        self._numbers = itertools.count(secrets.randbits(62) + 1)
        self._open: OrderedDict[int, Inquiry] = OrderedDict()

    def open(self, inquiry: Inquiry) -> int:
        number = next(self._numbers)
        self._open[number] = inquiry
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return number

    def close(self, number: int, partition: str, text: str) -> Inquiry | None:
        """The inquiry of this number, if it is of this question."""
        inquiry = self._open.pop(number, None)
        return inquiry if inquiry is not None and (inquiry.partition, inquiry.text) == (partition, text) else None


class Servings:
    """What was served lately and has not been judged by those who got it, and who did not like what he got."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[str, Serving] = OrderedDict()
        self._disliked: OrderedDict[str, None] = OrderedDict()

    def note(self, serving: Serving) -> None:
        self._by_key.pop(serving.key, None)
        self._by_key[serving.key] = serving
        if len(self._by_key) > _MOST_SERVED:
            self._by_key.popitem(last=False)

    def take(self, key: str) -> Serving | None:
        return self._by_key.pop(key, None)

    def dislike(self, key: str) -> None:
        """Who asks this got something wrong, and shall get no other's answer before he got one of his own."""
        self._disliked[key] = None
        if len(self._disliked) > _MOST_SERVED:
            self._disliked.popitem(last=False)

    def has_disliked(self, key: str) -> bool:
        return key in self._disliked

    def reconcile(self, key: str) -> None:
        """The question has an answer of its own now."""
        self._disliked.pop(key, None)

    def take_repeated(self, key: str, now: float) -> Serving | None:
        """The serving that somebody repeats so soon that he cannot have been content."""
        serving = self._by_key.get(key)
        return self.take(key) if serving is not None and now - serving.time <= REGENERATE_SECONDS else None

    def take_latest_of(self, entry: str) -> Serving | None:
        """The last serving of an entry: the one that somebody complains of."""
        key = next((key for key, serving in reversed(self._by_key.items()) if serving.entry == entry), None)
        return None if key is None else self._by_key.pop(key)
