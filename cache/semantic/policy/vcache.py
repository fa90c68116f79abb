"""vCache: a boundary of similarity for each entry, learned by asking the upstream now and then (arXiv 2502.03771)."""

import random
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from cache.semantic.policy.label import Label
from cache.semantic.policy.policy import Assessment, Decision, Evidence, Neighbourhood, RiskClassFigures
from cache.semantic.policy.state import freeze, thaw
from cache.semantic.policy.threshold import nearest

# Where a boundary may be (beyond 1: no similarity is enough), and how steep the curve is there.
_BOUNDARIES = np.linspace(0.0, 1.1, 56, dtype=np.float32)
_SLOPES = np.geomspace(5.0, 200.0, 8, dtype=np.float32)
# Shares of doubt over which the paper's minimum is sought.
_DOUBTS = np.array([0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2])
# Labels that an entry remembers; when there are so many, the older half is of an older world.
_MAX_LABELS = 256
# Two kilobytes each. Beyond it the entry goes that was labelled longest ago, and begins anew if it is still there.
_MAX_ENTRIES = 10_000
_KIND = "vcache"

Observation = tuple[Annotated[float, msgspec.Meta(ge=-1.001, le=1.001)], bool]


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
        if not 0.0 < delta < 1.0:
            raise ValueError(f"delta is {delta}; it must be a share of wrong answers between 0 and 1, such as 0.01.")
        self._delta = delta
        self._chance = chance
        self._curves: dict[str, _Curve] = {}

    def weigh(self, neighbourhood: Neighbourhood) -> Evidence:
        return nearest(neighbourhood)

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        curve = None if evidence is None else self._curves.get(evidence.entry)
        if evidence is None or curve is None:
            return Decision(False, 1.0, refusal="none near" if evidence is None else "warm-up")
        wrong = 1.0 - curve.surely_right(evidence.similarity)
        explore = 1.0 - self._delta / max(wrong, 1e-12)
        if wrong > max_risk:
            return Decision(False, wrong, wrong, refusal="max-risk")
        if self._chance.random() < explore:
            return Decision(False, wrong, wrong, refusal="exploration")
        return Decision(True, wrong, wrong, audit=compares, audit_chance=float(compares))

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Assessment:
        curve = self._curves.get(evidence.entry)
        if curve is None:
            return Assessment(False, 1.0, "it has seen no judgement of this entry")
        wrong = 1.0 - curve.surely_right(evidence.similarity)
        limit = min(self._delta, max_risk)
        place = "within" if wrong <= limit else "above"
        return Assessment(wrong <= limit, wrong, f"the risk {wrong:.4f} is {place} the limit {limit:.4f}")

    def learn(self, label: Label) -> None:
        """Take over an observation of an entry. Users' labels are none: of a boundary, "wrong" alone says nothing."""
        if label.source == "user":
            return
        curve = self._curves.pop(label.entry, None) or _Curve([])
        if len(curve.seen) == _MAX_LABELS:
            curve = _Curve(curve.seen[_MAX_LABELS // 2 :])
        curve.observe((label.similarity, label.same))
        self._curves[label.entry] = curve
        if len(self._curves) > _MAX_ENTRIES:
            del self._curves[next(iter(self._curves))]

    def settle(self, label: Label) -> None:
        """What it serves is not audited, so there is nothing to book."""

    def snapshot(self) -> bytes:
        return freeze(_KIND, _State({entry: curve.seen for entry, curve in self._curves.items()}))

    def restore(self, state: bytes) -> None:
        newest = list(thaw(state, _KIND, _State).seen.items())[-_MAX_ENTRIES:]
        self._curves = {entry: _Curve(seen) for entry, seen in newest}

    def figures(self) -> dict[str, float]:
        return {"delta": self._delta, "entries": len(self._curves)}

    def reliability(self) -> list[RiskClassFigures]:
        return []


class _State(msgspec.Struct, frozen=True, array_like=True):
    """What was seen of each entry. Raises ValueError for a similarity that is not a number."""

    seen: dict[str, Annotated[list[Observation], msgspec.Meta(max_length=_MAX_LABELS)]]

    def __post_init__(self) -> None:
        if not all(np.isfinite(similarity) for seen in self.seen.values() for similarity, _ in seen):
            raise ValueError("every similarity must be finite")


class _Curve:
    """What was `seen` of an entry: a posterior over boundary and slope, log likelihoods float32 [boundary, slope]."""

    __slots__ = ("_log", "seen")

    def __init__(self, seen: list[Observation]) -> None:
        self.seen = seen
        self._log: npt.NDArray[np.float32] = np.zeros((_BOUNDARIES.size, _SLOPES.size), dtype=np.float32)
        for observation in seen:
            self._log += _log_likelihood(*observation)

    def observe(self, observation: Observation) -> None:
        self.seen.append(observation)
        self._log += _log_likelihood(*observation)

    def surely_right(self, similarity: float) -> float:
        """The largest (1 - epsilon) * L(s, t', g)."""
        weights = np.exp(self._log - self._log.max(), dtype=np.float64)
        of_boundaries = weights.sum(axis=1)
        below = np.cumsum(of_boundaries) / of_boundaries.sum()
        bounds = np.searchsorted(below, 1.0 - _DOUBTS)
        slope = float((weights.sum(axis=0) * _SLOPES).sum() / weights.sum())
        right = (1.0 - _DOUBTS) / (1.0 + np.exp(-slope * (similarity - _BOUNDARIES[bounds])))
        return float(right.max())


def _log_likelihood(similarity: float, same: bool) -> npt.NDArray[np.float32]:
    """Of one observation, for each boundary and slope."""
    logits = _SLOPES * (np.float32(similarity) - _BOUNDARIES[:, None])
    likelihoods: npt.NDArray[np.float32] = -np.logaddexp(np.float32(0.0), -logits if same else logits)
    return likelihoods
