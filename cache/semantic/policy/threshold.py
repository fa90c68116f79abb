"""The static threshold that other caches have: the nearest neighbour's answer, if it is near enough."""

import numpy as np

from cache.semantic.policy.policy import Decision, Evidence, Neighbourhood, Policy

_NO_FEATURES = np.empty(0)


class ThresholdPolicy(Policy):
    """Serves what is at least so similar, without a bound on wrong answers.

    Args:
        threshold: least cosine similarity.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def vote(self, neighbourhood: Neighbourhood) -> Evidence:
        entries, similarities, answers = neighbourhood
        return Evidence((0,), entries[0], answers[0], float(similarities[0]), _NO_FEATURES)

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        if evidence is None:
            return Decision(False, None, refusal="none near")
        if max_risk < 1.0 or evidence.similarity < self._threshold:
            return Decision(False, None, refusal="max-risk" if max_risk < 1.0 else "similarity")
        return Decision(True, None, audit=compares, audit_chance=float(compares))

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Decision:
        return self.decide(evidence, max_risk)

    def reason(self, evidence: Evidence, decision: Decision, max_risk: float) -> str:
        if max_risk < 1.0:
            return "a fixed threshold knows no risk, which the request limits"
        place = "at or above" if decision.serve else "below"
        return f"the similarity {evidence.similarity:.4f} is {place} {self._threshold:g}"

    def figures(self) -> dict[str, float]:
        return {"threshold": self._threshold}
