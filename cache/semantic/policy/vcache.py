"""vCache: a boundary of similarity for each entry, learned by asking the upstream now and then (arXiv 2502.03771)."""

import random

import numpy as np
import numpy.typing as npt

from cache.semantic.policy.policy import Decision, Evidence, Label, Neighbourhood
from cache.semantic.policy.threshold import nearest

# Where a boundary may be (beyond 1: no similarity is enough), and how steep the curve is there.
_BOUNDARIES = np.linspace(0.0, 1.1, 56, dtype=np.float32)
_SLOPES = np.geomspace(5.0, 200.0, 8, dtype=np.float32)
# Shares of doubt over which the paper's minimum is sought.
_DOUBTS = np.array([0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2])


class VCachePolicy:
    """Keeps the share of wrong answers of each entry at or below delta.

    An entry's answer is right with probability L(s, t, g) = 1 / (1 + exp(-g * (s - t))) at similarity s. With
    probability tau a request explores: the upstream answers, and its answer is compared. Else it is served. The error
    stays at or below delta if

        tau >= 1 - delta / (1 - (1 - epsilon) * L(s, t', g))

    where t' is an upper bound of the boundary t that holds with probability 1 - epsilon; the smallest tau over epsilon
    is used. What is served is never compared: every label comes from exploring.

    The paper fits t and g by maximum likelihood, which says nothing of its own certainty while similarities separate
    right from wrong, as the first dozen of them mostly do. Here they are a posterior over a grid, flat at first: t' is
    its quantile, g the mean beside it.

    Args:
        delta: share of an entry's answers that may be wrong.
        chance: draws when to explore.
    """

    def __init__(self, delta: float, chance: random.Random) -> None:
        self._delta = delta
        self._chance = chance
        self._curves: dict[str, _Curve] = {}

    def weigh(self, neighbourhood: Neighbourhood) -> Evidence:
        return nearest(neighbourhood)

    def decide(self, evidence: Evidence | None, most_risk: float = 1.0) -> Decision:
        curve = None if evidence is None else self._curves.get(evidence.entry)
        if evidence is None or curve is None:
            return Decision(False, 1.0)
        wrong = 1.0 - curve.surely_right(evidence.similarity)
        explore = 1.0 - self._delta / max(wrong, 1e-12)
        return Decision(wrong <= most_risk and self._chance.random() >= explore, wrong)

    def learn(self, label: Label) -> None:
        self._curves.setdefault(label.evidence.entry, _Curve()).observe(label.evidence.similarity, label.same)

    def forget(self, entry: str) -> None:
        """Drop what is known of an entry that is gone."""
        self._curves.pop(entry, None)


class _Curve:
    """What was seen of one entry: a posterior over boundary and slope, as log likelihoods float32 [boundary, slope]."""

    __slots__ = ("_log",)

    def __init__(self) -> None:
        self._log: npt.NDArray[np.float32] = np.zeros((_BOUNDARIES.size, _SLOPES.size), dtype=np.float32)

    def observe(self, similarity: float, same: bool) -> None:
        logits = _SLOPES * (np.float32(similarity) - _BOUNDARIES[:, None])
        self._log -= np.logaddexp(np.float32(0.0), -logits if same else logits)

    def surely_right(self, similarity: float) -> float:
        """The largest (1 - epsilon) * L(s, t', g)."""
        weights = np.exp(self._log - self._log.max(), dtype=np.float64)
        of_boundaries = weights.sum(axis=1)
        below = np.cumsum(of_boundaries) / of_boundaries.sum()
        bounds = np.searchsorted(below, 1.0 - _DOUBTS)
        slope = float((weights.sum(axis=0) * _SLOPES).sum() / weights.sum())
        right = (1.0 - _DOUBTS) / (1.0 + np.exp(-slope * (similarity - _BOUNDARIES[bounds])))
        return float(right.max())
