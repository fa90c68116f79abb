"""What the policy serves of pairs that it has not learned from."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.evaluation.pairs import Flags, features_of, figures_of, served_by_policy
from cache.semantic.policy.policy import FeatureVector
from cache.semantic.wording.comparison import FEATURE_NAMES, TextComparison

PAIRS = 2000

Similarities = npt.NDArray[np.float32]


def population(seed: int, steepness: float) -> tuple[Similarities, Flags]:
    """Similarities between .6 and 1, and labels that are the likelier 1 the nearer; at a steepness of 0 all alike."""
    draw = np.random.default_rng(seed)
    similarities = draw.uniform(0.6, 1.0, PAIRS).astype(np.float32)
    same = draw.random(PAIRS) < 1.0 / (1.0 + np.exp(-steepness * (similarities - 0.8)))
    return similarities, same


def evidence(similarities: Similarities) -> list[FeatureVector]:
    """With words that are neither alike nor strange."""
    wording = TextComparison(0, "", (0.0,) * len(FEATURE_NAMES))
    return [features_of(similarity, wording) for similarity in similarities.tolist()]


def everything() -> Flags:
    return np.ones(PAIRS, dtype=np.bool_)


@pytest.mark.parametrize("delta", [0.005, 0.01, 0.02])
def test_wrong_answers_stay_within_the_budget(delta: float) -> None:
    """At most delta of all requests get a wrong answer where similarity is informative."""
    wrong, recall = [], []
    for seed in range(4):
        similarities, same = population(seed, steepness=30.0)
        figures = figures_of(served_by_policy(evidence(similarities), same, everything(), delta), same)
        wrong.append(figures["wrong_per_request"])
        recall.append(figures["recall"])
    assert np.mean(wrong) <= delta
    assert min(share for share in recall if share is not None) > 0.3


def test_the_policy_serves_nearly_as_much_as_the_best_threshold() -> None:
    """The policy has at least 95% of the hits of the best threshold with as many wrong ones."""
    similarities, same = population(7, steepness=30.0)
    policy = figures_of(served_by_policy(evidence(similarities), same, everything(), 0.01), same)
    best = max(
        (figures_of(similarities >= threshold, same) for threshold in np.arange(0.6, 1.0, 0.001)),
        key=lambda figures: figures["hits"] if figures["wrong_hits"] <= policy["wrong_hits"] else -1,
    )
    assert policy["hits"] >= 0.95 * best["hits"]


def test_the_policy_serves_little_where_no_similarity_is_safe() -> None:
    """The policy serves at most 2% of pairs whose similarity says nothing about their label."""
    similarities, same = population(3, steepness=0.0)
    assert served_by_policy(evidence(similarities), same, everything(), 0.01).mean() <= 0.02


@given(st.integers(0, 2**32 - 1), st.integers(0, 60))
@settings(max_examples=20, deadline=None)
def test_refused_pairs_and_pairs_with_few_labels_are_not_served(seed: int, allowed: int) -> None:
    """A pair with a veto is never served, and no pair is served with too few labels."""
    draw = np.random.default_rng(seed)
    similarities = draw.uniform(0.9, 1.0, 300).astype(np.float32)
    same = np.ones(300, dtype=np.bool_)
    few = np.arange(300) < allowed
    many = draw.random(300) < 0.7
    assert not served_by_policy(evidence(similarities), same, few, 0.01).any()
    assert not (served_by_policy(evidence(similarities), same, many, 0.5) & ~many).any()


def test_the_same_pairs_give_the_same_verdicts() -> None:
    """Evaluating the same pairs twice gives the same verdicts."""
    similarities, same = population(11, steepness=20.0)
    first = served_by_policy(evidence(similarities), same, everything(), 0.01)
    assert (first == served_by_policy(evidence(similarities), same, everything(), 0.01)).all()


def test_words_are_evidence_beside_the_similarity() -> None:
    """Of pairs with one similarity those are served whose words are alike, where these words tell right from wrong."""
    alike = np.arange(PAIRS) % 2 == 0
    told = [
        features_of(0.9, TextComparison(0, "", (0.0, 0.0, 1.5 if each else -0.5, 0.0, 2.25, 0.0))) for each in alike
    ]
    served = served_by_policy(told, alike, everything(), 0.01)
    assert figures_of(served, alike)["recall"] == 1.0
    assert not served[~alike].any()
