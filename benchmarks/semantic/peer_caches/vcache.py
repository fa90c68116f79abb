"""vCache: a boundary of similarity for each entry, learned by asking the upstream now and then (arXiv 2502.03771)."""

import random
from collections import defaultdict

import numpy as np
import numpy.typing as npt

from cache.semantic.evaluation.simulation import Ints, Outcome, Stream, StreamJudge, outcome_of

# Where a boundary may be (beyond 1: no similarity is enough), and how steep the curve is there.
_BOUNDARIES = np.linspace(0.0, 1.1, 56, dtype=np.float32)
_SLOPES = np.geomspace(5.0, 200.0, 8, dtype=np.float32)
# Shares of doubt over which the paper's minimum is sought.
_DOUBTS = np.array([0.001, 0.003, 0.01, 0.02, 0.05, 0.1, 0.2])


class VCache:
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
        delta: share of an entry's answers that may be wrong, (0, 1).
        chance: draws when to explore.
    """

    def __init__(self, delta: float, chance: random.Random) -> None:
        self._delta = delta
        self._chance = chance
        # Of each entry that was judged: log likelihoods, float32 [boundary, slope].
        self._curves: defaultdict[str, npt.NDArray[np.float32]] = defaultdict(
            lambda: np.zeros((_BOUNDARIES.size, _SLOPES.size), dtype=np.float32)
        )

    def serves(self, entry: str, similarity: float) -> bool:
        """Whether a request so near to `entry` is served its answer; if not, it explores."""
        if entry not in self._curves:
            return False
        wrong = 1.0 - _surely_right(self._curves[entry], similarity)
        return self._chance.random() >= 1.0 - self._delta / max(wrong, 1e-12)

    def learn(self, entry: str, similarity: float, same: bool) -> None:
        """Take over whether a fresh answer was that of `entry`."""
        logits = _SLOPES * (np.float32(similarity) - _BOUNDARIES[:, None])
        self._curves[entry] -= np.logaddexp(np.float32(0.0), -logits if same else logits)


def _surely_right(log_likelihoods: npt.NDArray[np.float32], similarity: float) -> float:
    """The largest (1 - epsilon) * L(s, t', g)."""
    weights = np.exp(log_likelihoods - log_likelihoods.max(), dtype=np.float64)
    of_boundaries = weights.sum(axis=1)
    below = np.cumsum(of_boundaries) / of_boundaries.sum()
    bounds = np.searchsorted(below, 1.0 - _DOUBTS)
    slope = float((weights.sum(axis=0) * _SLOPES).sum() / weights.sum())
    right = (1.0 - _DOUBTS) / (1.0 + np.exp(-slope * (similarity - _BOUNDARIES[bounds])))
    return float(right.max())


def serve_by_vcache(stream: Stream, order: Ints, delta: float, judge: StreamJudge, seed: int) -> Outcome:
    """What vCache serves of a stream.

    It compares no texts, and stores a question only if its answer is not that of the neighbour it was compared with, so
    that the neighbour's entry learns from all of them.
    """
    cache, chance = VCache(delta, random.Random(seed + 1)), random.Random(seed)  # noqa: S311  # reproducible
    stored = np.zeros(stream.size, dtype=np.bool_)
    steps = []
    for asked in order.tolist():
        near, similarities = stream.nearest(asked, stored, 1)
        hit, said, same = False, None, False
        if near.size:
            other, similarity = int(near[0]), float(similarities[0])
            same = bool(stream.answers[other] == stream.answers[asked])
            hit = cache.serves(str(other), similarity)
            if not hit:
                said = judge.compare(asked, other, same, chance)
            if said is not None:
                cache.learn(str(other), similarity, said)
        stored[asked] = not hit and not said
        steps.append(Outcome(hit, hit and not same, False))
    return outcome_of(steps)
