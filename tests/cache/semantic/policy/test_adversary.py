"""What the budget does when the world, its users or its judge turn against it."""

import pytest

from cache.semantic.policy.calibration import MAX_PENALTIES, WrongAnswerRisk
from cache.semantic.policy.policy import JudgeError, Label
from tests.cache.semantic.policy.streams import Stream, dice, near, right_at

DELTA = 0.01


def warm(complaints: float = 0.0, judge: JudgeError | None = None) -> Stream:
    """A stream that is served well: about every fifth request is a hit."""
    stream = Stream(DELTA, 1, judge, complaints=complaints)
    stream.run(2500, 40.0)
    assert stream.hits > 300
    assert stream.wrong / stream.requests <= DELTA
    return stream


@pytest.mark.parametrize(("complaints", "most"), [(0.0, 120), (0.3, 40)])
def test_a_burst_of_one_topic_whose_answer_is_wrong_is_cut_short(complaints: float, most: int) -> None:
    """Five hundred requests near five entries, all wrong: audits find each of the five, users sooner."""
    stream = warm(complaints)
    before = stream.wrong
    for turn in range(500):
        stream.ask(0.95, 0.0, entry=f"topic {turn % 5}")
    assert stream.wrong - before < most
    during = stream.wrong
    stream.run(1000, 40.0)
    assert stream.wrong - during <= DELTA * 1000


def test_after_a_shift_the_budget_is_kept_again_within_its_horizon() -> None:
    """All answers change, so that hardly any cached one is right: wrong answers end, and before that are bounded."""
    stream = warm()
    stream.run(700, 40.0, boundary=0.97)
    assert stream.wrong < 110
    during = stream.wrong
    stream.run(2000, 40.0, boundary=0.97)
    assert stream.wrong - during <= DELTA * 2000


def test_what_was_forgotten_is_learned_anew() -> None:
    """After ten thousand labels of a world in which nothing was right, one in which much is: hits come again."""
    stream = Stream(0.02, 2)
    stream.run(4000, 40.0, boundary=1.5)
    assert stream.hits == 0
    stream.run(4000, 40.0, boundary=0.7)
    before = stream.hits
    stream.run(500, 40.0, boundary=0.7)
    assert stream.hits - before > 50


def test_a_tenant_who_always_complains_takes_hits_and_gives_no_wrong_answer() -> None:
    """His complaints make risks twice as large at most: others get fewer hits, none of them riskier."""
    stream, chance = warm(), dice(7)
    hits = others = 0
    for _ in range(2500):
        evidence = near(chance.uniform(0.5, 1.0), entry=str(stream.requests))
        decision = stream.policy.decide(evidence)
        stream.requests += 1
        his = chance.random() < 0.1
        others += not his
        hits += decision.serve and not his
        if decision.serve and his:
            stream.tell(Label.of(evidence, decision, False, "user"))
        elif not decision.serve:
            right = chance.random() < right_at(evidence.similarity, 40.0)
            stream.tell(Label.of(evidence, decision, right, "miss"))
    assert 1.0 <= stream.policy.inflation <= 2.5
    assert hits / others > 0.03


def test_a_complaint_takes_its_entry_out_and_hardly_any_other() -> None:
    """Two fresh answers that say the same bring it back."""
    stream = warm()
    policy, evidence = stream.policy, near(0.96, entry="complained")
    decision = policy.decide(evidence)
    assert decision.serve
    complaint = Label.of(evidence, decision, False, "user")
    policy.learn(complaint)
    policy.settle(complaint)
    assert not policy.decide(evidence).serve
    assert policy.decide(near(0.96, entry="other")).serve
    for _ in range(2):
        policy.learn(Label.of(evidence, policy.decide(evidence), True, "miss"))
    assert policy.decide(evidence).serve


def test_users_who_find_nothing_wrong_are_believed_too() -> None:
    """Somebody who asked again, and whose fresh answer is the same as the cached one, blames nobody."""
    stream = warm()
    before = stream.policy.inflation
    evidence = near(0.96, entry="repeated")
    decision = stream.policy.decide(evidence)
    same = Label.of(evidence, decision, True, "user")
    stream.policy.learn(same)
    stream.policy.settle(same)
    assert stream.policy.decide(evidence).serve
    assert stream.policy.inflation <= before


@pytest.mark.parametrize("failed", [JudgeError(0.001, 0.0), JudgeError(0.5, 0.49)], ids=["no to all", "coin"])
def test_a_judge_who_fails_costs_hits(failed: JudgeError) -> None:
    """Who calls right answers different, always or at random, ends the hits."""
    stream = warm(judge=JudgeError(0.98, 0.01))
    stream.truly = failed
    stream.run(1500, 40.0)
    before = stream.hits, stream.wrong
    stream.run(1000, 40.0)
    assert stream.hits - before[0] < 20
    assert stream.wrong - before[1] <= DELTA * 1000


def test_a_judge_who_calls_all_the_same_is_seen_by_users_alone() -> None:
    """Audits go through him and find nothing. Complaints do not: in the end wrong answers are a fraction of those."""
    wrong = []
    for complaints in (0.0, 0.5):
        stream = warm(complaints, JudgeError(0.98, 0.01))
        stream.truly = JudgeError(1.0, 0.999)
        stream.run(2500, 40.0)
        before = stream.wrong
        stream.run(2500, 40.0)
        wrong.append(stream.wrong - before)
    assert wrong[1] < 0.6 * wrong[0]


def test_a_silent_judge_leaves_nothing_served_in_a_new_deployment() -> None:
    """Without labels there is no evidence, however long it takes."""
    stream = Stream(0.05, 1, unsure=1.0)
    stream.run(2500, 80.0)
    assert stream.hits == 0


def test_blame_is_bounded() -> None:
    """The longest blamed are forgotten when there are too many."""
    wrong_answer_risk = WrongAnswerRisk()
    for number in range(MAX_PENALTIES + 10):
        wrong_answer_risk.found(str(number), False)
    assert len(wrong_answer_risk.penalties) == MAX_PENALTIES
    assert wrong_answer_risk.risk_of("0") == 0.0
    assert wrong_answer_risk.risk_of(str(MAX_PENALTIES)) == 0.5


@pytest.mark.parametrize(("recall", "false_same"), [(0.5, 0.5), (0.2, 0.4), (1.1, 0.0), (0.9, -0.1)])
def test_a_judge_who_tells_nothing_apart_is_none(recall: float, false_same: float) -> None:
    with pytest.raises(ValueError, match="false_same"):
        JudgeError(recall, false_same)
