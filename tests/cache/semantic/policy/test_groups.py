"""Names of one answer are joined, by more than one judgement, and are one name in all that is learned."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.policy import groups as groups_module
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.calibration import MAX_PENALTIES, WrongAnswerRisk
from cache.semantic.policy.groups import Agreement, AnswerGroups
from cache.semantic.policy.policy import EqualAnswers, JudgeError, Label
from cache.semantic.policy.state import UnusableState, freeze, thaw

JUDGE = JudgeError(0.98, 0.01)
PAIR = EqualAnswers("a", "b")
BOTH = {"a": True, "b": True}
ONE = {"a": True, "b": False}


def judged(*verdicts: dict[str, bool], judge: JudgeError = JUDGE) -> list[list[EqualAnswers]]:
    agreement = Agreement()
    return [agreement.judged(said, judge) for said in verdicts]


def policy() -> BudgetPolicy:
    return BudgetPolicy(0.05, JUDGE, random.Random(0))  # noqa: S311  # reproducible


def test_three_fresh_answers_join_two_names() -> None:
    """That were equal to both; whichever was the nearer one."""
    assert judged(BOTH, BOTH, BOTH) == [[], [], [PAIR]]
    assert judged(BOTH, {"b": True, "a": True}, BOTH) == [[], [], [PAIR]]


def test_a_verdict_against_it_needs_one_more() -> None:
    """And many against it cannot be saved up: the judgement begins anew when they have outweighed the others."""
    assert judged(BOTH, BOTH, ONE, BOTH) == [[], [], [], [PAIR]]
    assert judged(BOTH, ONE, ONE, BOTH, BOTH) == [[]] * 5
    assert judged(*[ONE] * 100, BOTH, BOTH, BOTH)[-1] == [PAIR]


def test_a_worse_judge_needs_more() -> None:
    """What it calls the same by mistake oftener is the weaker evidence."""
    worse = judged(*[BOTH] * 10, judge=JudgeError(0.9, 0.1))
    assert worse.index([PAIR]) > 2


def test_who_never_errs_is_not_believed() -> None:
    """No judge is taken to be so good that one verdict would do."""
    assert judged(BOTH, BOTH, BOTH, judge=JudgeError(1.0, 0.0)) == [[], [], [PAIR]]


def test_what_is_equal_to_nothing_joins_nothing() -> None:
    """Nor what is equal to one answer."""
    assert judged(*[{"a": False, "b": False}] * 9, {}) == [[]] * 10
    assert judged(*[{"a": True}] * 9) == [[]] * 9


def test_what_is_remembered_of_pairs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest are kept."""
    monkeypatch.setattr(groups_module, "_MOST", 2)
    agreement = Agreement()
    for _ in range(2):
        for other in "bcd":
            agreement.judged({"a": True, other: True}, JUDGE)
    assert agreement.judged(BOTH, JUDGE) == []
    for _ in range(2):
        found = agreement.judged(BOTH, JUDGE)
    assert found == [PAIR]


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")), max_size=12))
def test_joined_names_are_one(pairs: list[tuple[str, str]]) -> None:
    """In whatever order they were joined, also by way of others; and after they were saved."""
    groups, parts = AnswerGroups(), {name: {name} for name in "abcdefgh"}
    for one, other in pairs:
        assert (groups.join(EqualAnswers(one, other)) is None) == (parts[one] is parts[other])
        together = parts[one] | parts[other]
        parts.update(dict.fromkeys(together, together))
    for kept in (groups, thaw(freeze("groups", groups), "groups", AnswerGroups)):
        assert all(kept.name_of(name) == min(part) for name, part in parts.items())


def test_joined_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are separate again."""
    monkeypatch.setattr(groups_module, "_MOST", 2)
    groups = AnswerGroups()
    separated = []
    for name in "bcd":
        groups.join(EqualAnswers("a", name))
        separated.append(groups.separate())
    assert separated == [None, None, ("b", "a")]
    assert [groups.name_of(name) for name in "bcd"] == ["b", "a", "a"]


def test_a_separate_answer_was_found_wrong_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was found of the name that it had been counted as."""
    monkeypatch.setattr(groups_module, "_MOST", 2)
    learned = policy()
    learned.join(PAIR)
    learned.learn(Label("b", tuple(learned.vote([("b", 0.9)]).features.tolist()), False, "user", 0.01))
    for name in "cd":
        assert learned.name_of("b") == "a"
        learned.join(EqualAnswers("a", name))
    assert learned.name_of("b") == "b"
    assert [learned.learned.wrong_answers.risk_of(name) for name in "abcd"] == [0.5, 0.5, 0.0, 0.0]


def test_joined_names_take_no_place_of_another_wrong_answer() -> None:
    """As many as can be were found wrong, and two of them are one: no other one is forgotten."""
    wrong = WrongAnswerRisk()
    for number in range(MAX_PENALTIES):
        wrong.found(str(number), same=False)
    wrong.rename("a", "7")
    assert [wrong.risk_of(name) for name in ("0", "7", "a")] == [0.5, 0.0, 0.5]


def test_equal_names_that_are_joined_again_are_as_wrong_as_before() -> None:
    """Other processes find the same pair."""
    learned = policy()
    learned.join(PAIR)
    learned.learn(Label("a", tuple(learned.vote([("a", 0.9)]).features.tolist()), False, "user", 0.01))
    learned.join(PAIR)
    assert learned.learned.wrong_answers.risk_of("a") == 0.5


@pytest.mark.parametrize("joined", [{"a": "a"}, {"a": "b", "b": "a"}, {"a": 1}, {"b" * 513: "a"}])
def test_what_cannot_have_been_joined_is_refused(joined: object) -> None:
    """A group has one name."""
    with pytest.raises(UnusableState):
        thaw(freeze("groups", [joined]), "groups", AnswerGroups)


def test_names_that_were_saved_one_after_the_other_are_one() -> None:
    """In whatever order; which of them is the oldest stays."""
    groups = thaw(freeze("groups", [{"d": "c", "c": "b", "b": "a"}]), "groups", AnswerGroups)
    assert groups.joined == {"d": "a", "c": "a", "b": "a"}
    assert list(groups.joined) == ["d", "c", "b"]


def test_the_policy_counts_joined_names_as_one() -> None:
    """In a vote; and it is saved."""
    learned = policy()
    learned.join(PAIR)
    restored = policy()
    restored.restore(learned.snapshot())
    for each in (learned, restored):
        evidence = each.vote([("b", 0.9), ("a", 0.8), ("c", 0.7)])
        assert (evidence.answer, evidence.members) == ("a", (0, 1))
        assert each.figures()["joined_answers"] == 1
    assert policy().vote([("b", 0.9), ("a", 0.8)]).members == (0,)


@pytest.mark.parametrize("is_joined_first", [True, False])
def test_an_answer_that_was_found_wrong_is_wrong_by_every_name(is_joined_first: bool) -> None:
    """Whether it was found before its names were joined or after."""
    learned = policy()
    wrong = Label("b", tuple(learned.vote([("b", 0.9)]).features.tolist()), False, "user", 0.01)
    if is_joined_first:
        learned.join(PAIR)
    learned.learn(wrong)
    if not is_joined_first:
        learned.join(PAIR)
    penalties = learned.learned.wrong_answers
    assert penalties.risk_of("a") == 0.5
    assert penalties.risk_of("b") == 0.0
