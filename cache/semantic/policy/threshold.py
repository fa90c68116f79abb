"""The static threshold that other caches have: the nearest neighbour's answer, if it is near enough."""

import msgspec
import numpy as np

from cache.semantic.policy.label import Label
from cache.semantic.policy.policy import Assessment, Decision, Evidence, Neighbourhood, RiskClassFigures
from cache.semantic.policy.state import freeze, thaw

_NO_FEATURES = np.empty(0)
_KIND = "threshold"


def nearest(neighbourhood: Neighbourhood) -> Evidence:
    """Evidence that is the nearest neighbour alone."""
    entries, similarities, answers = neighbourhood
    return Evidence((0,), entries[0], answers[0], float(similarities[0]), _NO_FEATURES)


class ThresholdPolicy:
    """Serves what is at least so similar, without a bound on wrong answers.

    Args:
        threshold: least cosine similarity.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def weigh(self, neighbourhood: Neighbourhood) -> Evidence:
        return nearest(neighbourhood)

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        if evidence is None:
            return Decision(False, None, refusal="none near")
        if max_risk < 1.0 or evidence.similarity < self._threshold:
            return Decision(False, None, refusal="max-risk" if max_risk < 1.0 else "similarity")
        return Decision(True, None, audit=compares, audit_chance=float(compares))

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Assessment:
        if max_risk < 1.0:
            return Assessment(False, None, "a fixed threshold knows no risk, which the request limits")
        serve = evidence.similarity >= self._threshold
        place = "at or above" if serve else "below"
        return Assessment(serve, None, f"the similarity {evidence.similarity:.4f} is {place} {self._threshold:g}")

    def learn(self, label: Label) -> None:
        """A fixed threshold learns nothing."""

    def settle(self, label: Label) -> None:
        """It has no audits, and keeps no books."""

    def snapshot(self) -> bytes:
        return freeze(_KIND, _State())

    def restore(self, state: bytes) -> None:
        thaw(state, _KIND, _State)

    def figures(self) -> dict[str, float]:
        return {"threshold": self._threshold}

    def reliability(self) -> list[RiskClassFigures]:
        return []


class _State(msgspec.Struct, frozen=True, array_like=True):
    """Nothing: whatever the threshold was, it is the operator's to say what it is."""
