"""The posterior learns who is right from labels, noisy ones too, and knows how little it knows."""

import random
import time

import numpy as np
import pytest

from cache.semantic.policy.policy import FeatureVector, JudgeError
from cache.semantic.policy.posterior import FEATURES, Posterior, evidence_of
from cache.semantic.policy.state import UnusableState, freeze


def features(similarity: float, rival: float) -> FeatureVector:
    return evidence_of([("one", similarity), ("other", rival)]).features


def taught(judge: JudgeError, labels: int, seed: int = 0) -> Posterior:
    """Answers are right with a probability that rises from 0 at a similarity of .7 to 1 at .9."""
    chance, posterior = random.Random(seed), Posterior()  # noqa: S311 - reproducible
    for _ in range(labels):
        similarity = chance.uniform(0.6, 1.0)
        right = chance.random() < min(1.0, max(0.0, (similarity - 0.7) / 0.2))
        said = chance.random() < (judge.recall if right else judge.false_same)
        posterior.learn(features(similarity, 0.55), said, judge)
    return posterior


def test_nobody_is_trusted_before_there_are_labels() -> None:
    """Taken one deviation too high, even a perfect neighbour's risk is far above any budget."""
    assert Posterior().wrong(features(1.0, 0.2), 1.0) > 0.05


@pytest.mark.parametrize("judge", [JudgeError(1.0, 0.0), JudgeError(0.98, 0.01), JudgeError(0.9, 0.05)])
def test_risks_are_what_happens(judge: JudgeError) -> None:
    """After 2,000 labels, whoever gave them: near neighbours are right, far ones wrong, and between it is between."""
    posterior = taught(judge, 2000)
    assert posterior.wrong(features(0.97, 0.55), 0.0) < 0.03
    assert posterior.wrong(features(0.63, 0.55), 0.0) > 0.95
    assert posterior.wrong(features(0.8, 0.55), 0.0) == pytest.approx(0.5, abs=0.15)


def test_a_judge_known_to_err_is_not_believed_every_time() -> None:
    """He who takes his word as true ends with risks that are never below his error."""
    judge = JudgeError(0.9, 0.0)
    chance, believed, known = random.Random(1), Posterior(), Posterior()  # noqa: S311 - reproducible
    for _ in range(3000):
        similarity = chance.uniform(0.9, 1.0)  # all right
        said = chance.random() < judge.recall
        believed.learn(features(similarity, 0.55), said, JudgeError(1.0, 0.0))
        known.learn(features(similarity, 0.55), said, judge)
    assert believed.wrong(features(0.97, 0.55), 0.0) > 0.05
    assert known.wrong(features(0.97, 0.55), 0.0) < 0.02


@pytest.mark.parametrize(("recall", "wrong"), [(1.0, 1.0), (0.99, 0.5), (0.6, 0.025)])
def test_what_is_called_different_is_seldom_wrong_if_the_judge_knows_few_same_answers(
    recall: float, wrong: float
) -> None:
    """Of answers that are wrong once in a hundred times."""
    assert JudgeError(recall, 0.0).really_wrong(0.01) == pytest.approx(wrong, abs=0.01)


def test_labels_make_it_surer() -> None:
    """What a deviation adds shrinks with the labels, and more of them is never less safe."""
    few, many = taught(JudgeError(1.0, 0.0), 30), taught(JudgeError(1.0, 0.0), 3000)

    def doubt(posterior: Posterior) -> float:
        near = features(0.93, 0.6)
        return posterior.wrong(near, 1.0) - posterior.wrong(near, 0.0)

    assert doubt(many) < doubt(few) / 2
    assert few.wrong(features(0.9, 0.5), 2.0) > few.wrong(features(0.9, 0.5), 1.0) > few.wrong(features(0.9, 0.5), 0.0)


def test_labels_that_contradict_each_other_break_nothing() -> None:
    """The same evidence, right and wrong for ever: a half, and still a probability."""
    posterior = Posterior()
    for turn in range(5000):
        posterior.learn(features(0.99, 0.98), turn % 2 == 0, JudgeError(1.0, 0.0))
    assert posterior.wrong(features(0.99, 0.98), 0.0) == pytest.approx(0.5, abs=0.05)
    assert 0.0 <= posterior.wrong(features(-1.0, -1.0), 3.0) <= 1.0


def test_what_would_not_be_finite_is_not_learned() -> None:
    """Whoever calls it with numbers that overflow; it goes on with what it knew."""
    posterior = taught(JudgeError(1.0, 0.0), 50)
    before = freeze("posterior", posterior)
    with pytest.raises(UnusableState, match="finite"), np.errstate(all="ignore"):
        posterior.learn([1e160] * FEATURES, True, JudgeError(1.0, 0.0))
    assert freeze("posterior", posterior) == before


def test_a_label_is_learned_between_two_lookups() -> None:
    """In less than a millisecond of the event loop, the hundredth too, with which some of the others is forgotten."""
    longest = []
    for _ in range(5):
        posterior, took = Posterior(), []
        for turn in range(200):
            began = time.thread_time()
            posterior.learn(features(0.6 + turn / 1000, 0.55), turn % 3 == 0, JudgeError(0.98, 0.01))
            took.append(time.thread_time() - began)
        longest.append(max(took))
    assert min(longest) < 0.001
