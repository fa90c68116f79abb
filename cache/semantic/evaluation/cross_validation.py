"""What the budget policy would serve of pairs that it has not learned from, and the figures of what is served."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.semantic.policy.budget import DEVIATIONS, WARM_LABELS
from cache.semantic.policy.evidence import evidence_of
from cache.semantic.policy.ledger import max_risk
from cache.semantic.policy.policy import FeatureVector, JudgeError, Neighbourhood
from cache.semantic.policy.posterior import Posterior
from cache.semantic.wording.comparison import TextComparison

FOLDS = 5
MAX_LABELS = 20_000
"""Labels that a fold's posterior learns from at most: it has few weights, and more labels move them no more."""

_SEED = 20260
Flags = npt.NDArray[np.bool_]


class Figures(NamedTuple):
    """What came of serving some of a set of pairs; None where a share has no whole.

    `recall` is the share of the positive pairs that are served, `negatives_served` that of the negative ones, and
    `wrong_share_of_hits` the share of negative pairs among those served, 0 where none is. `wrong_per_request` is their
    share of all pairs: what a budget of wrong answers limits.
    """

    recall: float | None
    wrong_share_of_hits: float
    negatives_served: float | None
    wrong_per_request: float
    hits: int
    wrong_hits: int


def figures_of(served: Flags, same: Flags) -> Figures:
    """The figures of serving the pairs `served`, bool [pairs], of which `same` are right to serve, bool [pairs]."""
    hits, wrong, positives, pairs = int(served.sum()), int((served & ~same).sum()), int(same.sum()), len(same)
    return Figures(
        recall=(hits - wrong) / positives if positives else None,
        wrong_share_of_hits=wrong / hits if hits else 0.0,
        negatives_served=wrong / (pairs - positives) if pairs > positives else None,
        wrong_per_request=wrong / pairs,
        hits=hits,
        wrong_hits=wrong,
    )


def served_by_policy(evidence: Sequence[FeatureVector], same: Flags, allowed: Flags, delta: float) -> Flags:
    """Which pairs the budget policy serves when each is judged by what was learned from the others; bool [pairs].

    A file has no traffic, so this is not the policy as it lives: there each audit and each miss near a neighbour
    teaches it, and it weighs the votes of sixteen neighbours. Here the pairs are divided at random, always the same
    way, into FOLDS parts. For each part, a posterior of correctness learns from the labels of the other parts, every
    pair a neighbourhood of one; the limit of risk is the highest at which, of the other parts' pairs, neither the
    expected nor the actual wrong answers are more than `delta` of all requests, and what is below it is served. Only
    pairs that the vetoes allow (`allowed`, bool [pairs]) are learned from and served; all are requests. With fewer
    labels than the live policy needs, WARM_LABELS, nothing is served.

    Args:
        evidence: see `features_of`, float64 [FEATURES] for each pair.
        same: whether a pair is right to serve, bool [pairs].
        delta: share of all requests that may be answered wrongly.
    """
    served = np.zeros(len(same), dtype=np.bool_)
    order = list(range(len(same)))
    random.Random(_SEED).shuffle(order)  # noqa: S311  # a division of data, nothing secret
    for fold in range(FOLDS):
        asked = order[fold::FOLDS]
        known = [place for part in range(FOLDS) if part != fold for place in order[part::FOLDS]]
        taught = [place for place in known if allowed[place]]
        if len(taught) < WARM_LABELS:
            continue
        posterior = Posterior()
        for place in taught[:MAX_LABELS]:
            posterior.learn(evidence[place], bool(same[place]), JudgeError())
        risks = np.array([posterior.wrong(evidence[place], DEVIATIONS) for place in taught])
        limit = _limit(risks, same[taught], delta * len(known), max_risk(delta))
        for place in asked:
            served[place] = allowed[place] and posterior.wrong(evidence[place], DEVIATIONS) <= limit
    return served


def features_of(similarity: float, wording: TextComparison) -> FeatureVector:
    """Of a pair as a question with one neighbour; nothing is known of the words of one with a veto."""
    evidence = evidence_of(Neighbourhood(("",), (similarity,), ("",)))
    return (evidence if wording.veto else evidence.with_texts(wording.features)).features


def _limit(risks: npt.NDArray[np.float64], same: Flags, budget: float, most: float) -> float:
    """The highest risk, `most` at most, up to which at most `budget` answers are wrong, expected or in fact.

    Pairs of one risk, such as those of one similarity, are served all or none.
    """
    order = np.argsort(risks, kind="stable")
    sorted_risks = risks[order]
    wrong = np.maximum(np.cumsum(sorted_risks), np.cumsum(~same[order]))
    within = (wrong <= budget) & (sorted_risks <= most)
    is_last_of_its_risk = np.append(sorted_risks[1:] > sorted_risks[:-1], True)
    ends = np.flatnonzero(within & is_last_of_its_risk)
    return float(sorted_risks[ends[-1]]) if len(ends) else -1.0
