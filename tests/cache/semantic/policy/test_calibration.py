"""The correction by judgements goes both ways, and is careful as long as they are few."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.policy.calibration import Calibration
from cache.semantic.policy.policy import JudgeError, Label, Source
from cache.semantic.policy.state import UnusableState, freeze, thaw

SURE = JudgeError(1.0, 0.0)


def judged(same: bool, risk: float = 0.01, source: Source = "audit") -> Label:
    return Label("answer", (), same, source, risk, 0.5)


def after(audits: int, wrong: float, risk: float = 0.01, judge: JudgeError = SURE, seed: int = 1) -> float:
    """The ratio after audits of answers with this risk, of which a share was wrong."""
    calibration, chance = Calibration(), random.Random(seed)  # noqa: S311  # reproducible
    for _ in range(audits):
        same = chance.random() >= wrong
        said = chance.random() < (judge.recall if same else judge.false_same)
        calibration.count(judged(said, risk), judge.recall, 0.01)
    return calibration.ratio


def test_nothing_known_is_no_reason_to_trust_the_posterior() -> None:
    """Before any judgement twice as many wrong answers are reckoned with, and more."""
    assert after(0, 0.0) > 2.0


def test_it_goes_both_ways() -> None:
    """Twice as many wrong answers as expected, and a third as many."""
    assert 2.0 < after(3000, 0.02) < 3.0
    assert 0.3 < after(3000, 0.003) < 0.9


def test_no_number_of_right_answers_makes_a_risk_nothing() -> None:
    """A quarter of what the posterior says is the least."""
    assert after(100_000, 0.0) == 0.25


def test_few_judgements_leave_it_higher() -> None:
    """With the same share of wrong answers."""
    means = [sum(after(audits, 0.01, seed=seed) for seed in range(20)) / 20 for audits in (50, 400, 3000)]
    assert means[0] > means[1] > means[2] > 1.0


def test_the_judges_own_mistakes_are_taken_off() -> None:
    """A judge who calls one in ten of the same answers different."""
    judge = JudgeError(recall=0.9, false_same=0.0)
    assert after(3000, 0.01, judge=judge) == pytest.approx(after(3000, 0.01), abs=0.6)


def test_misses_near_the_limit_count_less_than_audits() -> None:
    """Others, and complaints, do not."""
    calibration = Calibration()
    before = calibration.ratio
    for label in (judged(False, 0.3, "miss"), judged(False, 0.005, "miss"), judged(False, 0.05, "user")):
        calibration.count(label, 1.0, 0.01)
    assert calibration.ratio == before
    calibration.count(judged(False, 0.05, "miss"), 1.0, 0.01)
    of_miss = calibration.ratio
    calibration.count(judged(False, 0.05, "audit"), 1.0, 0.01)
    assert 0 < of_miss - before < calibration.ratio - of_miss


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.sampled_from(["audit", "miss", "user"])), max_size=60))
def test_it_is_always_a_number_and_survives_its_state(labels: list[tuple[bool, float, Source]]) -> None:
    """At least the least, and the same when it is restored."""
    calibration = Calibration()
    for same, risk, source in labels:
        calibration.count(judged(same, risk, source), 0.8, 0.01)
    assert 0.25 <= calibration.ratio < math.inf
    assert thaw(freeze("calibration", calibration), "calibration", Calibration) == calibration


@pytest.mark.parametrize("state", [(math.nan, 1.0), (1.0, math.nan), (1.0, 0.1), (-1.0, 1.0), (1.0, 1e9)])
def test_an_impossible_state_is_refused(state: tuple[float, float]) -> None:
    """Not finite, less than was known before anything came, or more than is remembered."""
    with pytest.raises(UnusableState, match=r"`float` [<>]= "):
        thaw(freeze("calibration", state), "calibration", Calibration)
