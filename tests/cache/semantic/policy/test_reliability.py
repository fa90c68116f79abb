"""What was predicted is compared with what judgements have shown."""

import math

import pytest

from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.calibration import BOUNDS, Reliability
from cache.semantic.policy.policy import JudgeError, Label, Source
from cache.semantic.policy.posterior import FEATURES
from cache.semantic.policy.state import UnusableState, freeze
from tests.cache.semantic.policy.streams import Stream, dice

SURE = JudgeError(1.0, 0.0)


def label(risk: float, same: bool, source: Source = "miss", chance: float = 1.0) -> Label:
    return Label("answer", (0.5,) * FEATURES, same, source, risk, chance)


def test_labels_are_counted_by_what_was_predicted() -> None:
    """A class has those above its lower bound and up to its upper one; classes without labels are left out."""
    reliability = Reliability()
    for risk, same in ((0.0, True), (0.001, True), (0.0011, True), (0.15, False), (0.2, True), (1.0, False)):
        reliability.count(label(risk, same))
    found = reliability.figures(SURE)
    assert [(each["above"], each["up_to"], each["labels"], each["observed"]) for each in found] == [
        (0.0, 0.001, 2, 0.0),
        (0.001, 0.002, 1, 0.0),
        (0.1, 0.2, 2, 0.5),
        (0.5, 1.0, 1, 1.0),
    ]
    assert [each["predicted"] for each in found] == pytest.approx([0.0005, 0.0011, 0.175, 1.0])
    assert all(each["low"] <= each["observed"] <= each["high"] for each in found)


def test_an_audit_stands_for_the_hits_that_were_not_audited() -> None:
    """One that was drawn with a chance of a tenth weighs ten times a miss, and makes the interval no narrower."""
    reliability = Reliability()
    for _ in range(10):
        reliability.count(label(0.03, True))
    for same in (True, False):
        reliability.count(label(0.03, same, "audit", 0.1))
    (found,) = reliability.figures(SURE)
    assert (found["labels"], found["audits"]) == (12, 2)
    assert found["observed"] == pytest.approx(10 / 30)
    plain = Reliability()
    for number in range(12):
        plain.count(label(0.03, number >= 4))
    (even,) = plain.figures(SURE)
    assert even["observed"] == pytest.approx(found["observed"])
    assert found["high"] - found["low"] > even["high"] - even["low"]


def test_complaints_are_left_out() -> None:
    """Nobody tells of a right answer, so a share of complaints is none of wrong answers."""
    reliability = Reliability()
    reliability.count(label(0.03, False, "user", 0.5))
    assert reliability.figures(SURE) == []


def test_the_judges_mistakes_are_taken_off() -> None:
    """A judge who calls a fifth of the same answers different has found nothing wrong with a fifth."""
    reliability = Reliability()
    for number in range(100):
        reliability.count(label(0.03, number % 5 > 0))
    (found,) = reliability.figures(JudgeError(0.8, 0.0))
    assert found["observed"] == pytest.approx(0.0, abs=1e-12)
    assert 0.0 < found["high"] < 0.2


def test_the_newest_labels_count_most() -> None:
    """However many there are, what was counted long ago fades, and the counts stay bounded."""
    reliability = Reliability()
    for _ in range(50_000):
        reliability.count(label(0.03, False))
    for _ in range(20_000):
        reliability.count(label(0.03, True))
    (found,) = reliability.figures(SURE)
    assert found["labels"] < 4_096
    assert found["observed"] < 0.01


def test_predictions_of_a_stream_are_what_comes_true() -> None:
    """Of what lies above the budget's limit as well as below: but for chance, no class is wrong more often than was
    predicted for it, and what was predicted to be wrong mostly is.
    """
    stream = Stream(0.02, 5, audit_share=0.2)
    stream.run(20_000, 40.0)
    found = stream.policy.reliability()
    assert sum(each["labels"] for each in found) > 8_000
    assert sum(each["audits"] for each in found) > 300
    assert all(each["low"] <= max(each["predicted"], 0.002) for each in found), found
    assert found[-1]["observed"] > 0.8
    assert found[0]["observed"] < 0.02


def test_what_was_counted_is_part_of_the_state() -> None:
    """Another process that hears the same, or restores it, shows the same."""
    stream = Stream(0.02, 3)
    stream.run(2_000, 40.0)
    other = BudgetPolicy(0.02, SURE, dice(99))
    for each in stream.labels:
        other.learn(each)
    assert other.reliability() == stream.policy.reliability()
    restored = BudgetPolicy(0.02, SURE, dice(7))
    restored.restore(stream.policy.snapshot())
    assert restored.reliability() == stream.policy.reliability()


@pytest.mark.parametrize(
    ("classes", "why"),
    [
        (((1, 0, 1.0, 1.0, 0.5, 0.0),) * (len(BOUNDS) - 1), "length"),
        (((1, 0, math.nan, 1.0, 0.5, 0.0),) * len(BOUNDS), ">= 0"),
        (((1, 0, 1.0, 1.0, 0.5, 2.0),) * len(BOUNDS), "more than the whole"),
        (((1, 2, 1.0, 1.0, 0.5, 0.0),) * len(BOUNDS), "more than the whole"),
        (((-1, 0, 1.0, 1.0, 0.5, 0.0),) * len(BOUNDS), ">= 0"),
        (((1, 0, 0.0, 0.0, 0.0, 0.0),) * len(BOUNDS), "without a weight"),
    ],
)
def test_counts_that_cannot_have_been_are_refused(classes: tuple[tuple[float, ...], ...], why: str) -> None:
    """Whatever is shown has been counted."""
    policy = BudgetPolicy(0.02, SURE, dice())
    learned = policy.learned
    state = freeze("budget", (learned.posterior, learned.calibration, learned.wrong_answers, (classes,)))
    with pytest.raises(UnusableState, match=why):
        policy.restore(state)
