"""The judge's errors, estimated from pairs of answers of which it is known whether they say the same."""

import math
import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.judge import error_rates
from cache.semantic.judge.answer import AnswerClass
from cache.semantic.judge.error_rates import MAX_FALSE_SAME, PRIOR_ERROR, ErrorRates, JudgedPair, _upper
from cache.semantic.judge.judge import MAX_SCORE
from cache.semantic.policy.state import UnusableState, freeze, thaw

SAME_ABOVE = 1.0


def pair(
    score: float,
    source: Literal["again", "first", "unrelated"] = "again",
    answers: AnswerClass = "prose",
    model: str = "m",
    unrepeatable: float = 0.0,
) -> JudgedPair:
    return JudgedPair(model, answers, source, score, unrepeatable)


def counted(pairs: list[JudgedPair]) -> ErrorRates:
    rates = ErrorRates(SAME_ABOVE)
    for each in pairs:
        rates.count(each)
    return rates


def test_before_there_are_pairs_different_counts_in_full() -> None:
    """The judge is taken to recognise every same answer, and to be wrong of more different ones than it may be."""
    rates = ErrorRates(SAME_ABOVE)
    assert rates.limit("m", "prose") == SAME_ABOVE
    assert rates.error("m", "prose").recall > 0.999
    assert 0.01 <= rates.error("m", "prose").false_same < 0.03
    assert PRIOR_ERROR.recall == 1.0


@pytest.mark.parametrize("recall", [0.3, 0.6, 0.9])
def test_recall_is_that_of_the_pairs_and_seldom_too_low(recall: float) -> None:
    """It is an upper bound that comes near with the pairs: a recall that is too high keeps the budget."""
    upper = []
    for seed in range(40):
        chance = random.Random(seed)  # noqa: S311  # reproducible
        rates = counted([pair(2.0 if chance.random() < recall else -2.0) for _ in range(300)])
        upper.append(rates.error("m", "prose").recall)
    assert sum(bound >= recall for bound in upper) >= 34
    assert sum(upper) / len(upper) < recall + 0.07


def test_classes_and_models_have_errors_of_their_own() -> None:
    """Code that is never recognised says nothing of prose, nor of another model's code."""
    rates = counted([pair(-2.0, answers="code") for _ in range(100)])
    assert rates.error("m", "code").recall < 0.2
    assert rates.error("m", "prose").recall > 0.999
    assert rates.error("other", "code").recall > 0.999


def test_unrelated_answers_raise_the_limit_and_never_lower_it() -> None:
    """An upstream whose answers all begin alike looks as if they were the same: the limit rises above that."""
    easy = counted([pair(-9.0, "unrelated") for _ in range(1000)])
    assert easy.limit("m", "prose") == SAME_ABOVE
    assert easy.error("m", "prose").false_same == 0.01, "other different answers are harder than these"
    alike = counted([pair(3.1 if number % 20 == 0 else -9.0, "unrelated") for number in range(1000)])
    assert 3.1 < alike.limit("m", "prose") < 3.6
    assert alike.error("m", "prose").false_same <= 0.02


def test_a_higher_limit_has_less_recall() -> None:
    """Recall is that above the limit of the moment."""
    known = [pair(2.0 if number % 2 else 6.0) for number in range(100)]
    assert counted(known).error("m", "prose").recall > 0.99
    raised = counted(known + [pair(3.1, "unrelated") for _ in range(200)])
    assert raised.error("m", "prose").recall < 0.65


def test_labels_of_a_judge_that_says_same_of_all_are_worth_little() -> None:
    """Its error is still one that a policy can reckon with."""
    rates = counted([pair(MAX_SCORE, source) for source in ("again", "unrelated") for _ in range(500)])
    error = rates.error("m", "prose")
    assert error.false_same == pytest.approx(error.recall / 2)


def test_a_share_of_questions_has_answers_that_disagree() -> None:
    """One in ten before any is known, and then as many as there are."""
    rates = ErrorRates(SAME_ABOVE)
    assert rates.unrepeatable("m", "prose") == pytest.approx(-2.197, abs=0.01)
    for number in range(200):
        rates.count(pair(0.0, "first", unrepeatable=float(number % 2)))
    assert rates.unrepeatable("m", "prose") == pytest.approx(0.0, abs=0.1)
    assert rates.unrepeatable("m", "code") < -2.0


@given(
    st.lists(
        st.builds(
            pair,
            st.floats(-MAX_SCORE, MAX_SCORE),
            st.sampled_from(["again", "first", "unrelated"]),
            st.sampled_from(["short", "structured", "prose", "code"]),
            st.sampled_from(["m", "gpt 4", ""]),
            st.floats(0, 1),
        ),
        max_size=60,
    )
)
def test_what_is_learned_travels_and_survives(pairs: list[JudgedPair]) -> None:
    """Pairs are read as they were written, and a restored state knows the same of every class."""
    rates = counted([thaw(freeze("pair", each), "pair", JudgedPair) for each in pairs])
    other = ErrorRates(SAME_ABOVE)
    other.restore(rates.snapshot())
    assert other.figures() == rates.figures()
    for each in pairs:
        error = other.error(each.model, each.answers)
        assert error == rates.error(each.model, each.answers)
        assert 0.0 < error.false_same < error.recall <= 1.0


def test_old_pairs_fade() -> None:
    """A model that begins to word its answers anew is found out, however long it did not."""
    rates = counted([pair(2.0) for _ in range(20_000)] + [pair(-2.0) for _ in range(6_000)])
    assert rates.error("m", "prose").recall < 0.2


@pytest.mark.parametrize("state", [b"", b"KGS", ErrorRates(SAME_ABOVE).snapshot()[:-1], freeze("pair", pair(0.0))])
def test_a_damaged_state_changes_nothing(state: bytes) -> None:
    """It raises, and what was known is known."""
    rates = counted([pair(-2.0) for _ in range(50)])
    before = rates.figures()
    with pytest.raises(UnusableState):
        rates.restore(state)
    assert rates.figures() == before


def test_the_limit_is_the_lowest_that_will_do() -> None:
    """As a search of every place finds it, with bounds that are measured anew only for what was counted since."""
    measured: list[float] = []

    def upper(successes: float, failures: float) -> float:
        measured.append(successes)
        return _upper(successes, failures)

    chance = random.Random(1)  # noqa: S311  # reproducible
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error_rates, "_upper", upper)
        for _ in range(20):
            mean, spread = chance.uniform(-9, 9), chance.uniform(0.1, 4)
            scores = [max(-9.9, min(9.9, chance.gauss(mean, spread))) for _ in range(chance.choice([10, 300, 900]))]
            rates = counted([pair(score, "unrelated") for score in scores])
            measured.clear()
            limit = rates.limit("m", "prose")
            assert len(measured) <= 10
            false = [sum(int((score + 10) * 4) >= place for score in scores) for place in range(80)]
            low = [not n or _upper(n + 1, len(scores) - n + 99) <= MAX_FALSE_SAME for n in false]
            assert limit == next((place / 4 - 10 for place in range(44, 79) if low[place]), 79 / 4 - 10)
            known = rates.figures()
            measured.clear()
            assert rates.figures() == known
            assert not measured
            rates.count(pair(0.0, answers="code"))
            assert [each["answers"] for each in rates.figures()] == ["prose", "code"]
            assert len(measured) <= 10


@pytest.mark.parametrize(
    ("unrelated", "unrepeatable", "questions"),
    [(0.0, 100.0, 0.0), (0.0, 1e9, 1e9 - 500), (0.0, math.nan, 1.0), (0.0, 1.0, math.nan), (math.nan, 0.0, 0.0)],
)
def test_impossible_counts_are_refused(unrelated: float, unrepeatable: float, questions: float) -> None:
    """No more questions than there are have answers that disagree; else no later lookup could be decided."""
    counts = ([0.0] * 80, [unrelated] * 80, unrepeatable, questions)
    with pytest.raises(UnusableState):
        ErrorRates(SAME_ABOVE).restore(freeze("judge's errors", ({"short m": counts},)))


def test_names_are_bounded() -> None:
    """Clients may invent models; the latest are kept."""
    rates = counted([pair(0.0, model=f"m{number}") for number in range(1000)])
    assert len(rates.figures()) == 256
