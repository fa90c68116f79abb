"""The budget holds on streams whose questions are made, and is spent on the safest hits."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.policy.budget import WARM_LABELS, BudgetPolicy
from cache.semantic.policy.ledger import HORIZON, max_risk
from cache.semantic.policy.policy import Decision, JudgeError, Label, Source
from tests.cache.semantic.policy.streams import Stream, dice, near, right_at, risk_of


@pytest.mark.parametrize("delta", [0.02, 0.01, 0.005])
@pytest.mark.parametrize("judge", [JudgeError(1.0, 0.0), JudgeError(0.98, 0.01)], ids=["sure", "errs"])
def test_wrong_answers_stay_within_the_budget(delta: float, judge: JudgeError) -> None:
    """On average over streams, for steep and flat relations of similarity and truth; and there are hits."""
    wrong, hits = [], []
    for seed, steepness in enumerate((20.0, 40.0, 80.0)):
        stream = Stream(delta, seed, judge)
        stream.run(2500, steepness)
        wrong.append(stream.wrong / stream.requests)
        hits.append(stream.hits / stream.requests)
    assert np.mean(wrong) <= delta
    assert np.mean(hits) > 0.1


SIMILARITIES = [percent / 100 for percent in range(50, 100)]


def test_nothing_is_served_before_there_is_evidence() -> None:
    """Not to the nearest neighbour either, until so many labels have come."""
    stream = Stream(0.02, 0)
    hits = [stream.ask(0.99, 1.0) for _ in range(WARM_LABELS + 200)]
    assert not any(hits[:WARM_LABELS])
    assert any(hits[WARM_LABELS:])
    assert stream.policy.figures()["warm_labels"] == WARM_LABELS


def test_without_evidence_nothing_is_served() -> None:
    """No neighbour, or none that the vetoes let pass: whatever the budget."""
    stream = Stream(0.5, 0)
    stream.run(500, 80.0)
    assert stream.hits
    assert not any(stream.policy.decide(None).serve for _ in range(3 * HORIZON))


def test_the_budget_goes_to_the_safest() -> None:
    """Whatever is served is not riskier than what is refused right after it."""
    stream = Stream(0.01, 3)
    stream.run(3000, 40.0)
    decisions = [stream.policy.decide(near(similarity)) for similarity in (0.99, 0.9, 0.85, 0.8, 0.75, 0.7)]
    served = [risk_of(decision) for decision in decisions if decision.serve]
    refused = [risk_of(decision) for decision in decisions if not decision.serve]
    assert served
    assert refused
    assert max(served) < min(refused)


def test_a_large_budget_serves_nothing_that_is_likely_wrong() -> None:
    """Room in the budget is no reason to give somebody a wrong answer."""
    for delta, most in ((0.5, 0.5), (0.02, 0.4), (0.01, 0.2), (0.001, 0.1)):
        stream = Stream(delta, 0)
        stream.run(3000, 40.0)
        assert max_risk(delta) == most
        served = [decision for decision in map(stream.policy.decide, map(near, SIMILARITIES)) if decision.serve]
        assert all(risk_of(decision) <= most for decision in served)
        risky = stream.policy.decide(near(0.55))
        assert risk_of(risky) > most
        assert not risky.serve


def test_a_caller_may_ask_for_less_risk() -> None:
    """And gets what is safer than that, no more."""
    stream = Stream(0.02, 1)
    stream.run(3000, 40.0)
    plain = stream.policy.decide(near(0.93))
    assert plain.serve
    assert not stream.policy.decide(near(0.93), max_risk=risk_of(plain) / 2).serve
    assert stream.policy.decide(near(0.93), max_risk=risk_of(plain) * 2).serve


def test_audits_that_find_wrong_answers_close_the_door() -> None:
    """The world changes: what was always right is now wrong every second time. Audits notice, and hits end."""
    stream = Stream(0.01, 5)
    for _ in range(1500):
        stream.ask(0.95, 1.0)
    assert stream.hits > 1000
    before = stream.hits
    for _ in range(1500):
        stream.ask(0.95, 0.5)
    assert stream.hits - before < 1000
    assert not any(stream.ask(0.95, 0.5) for _ in range(200))


@pytest.mark.parametrize("source", ["audit", "user"])
def test_an_answer_that_was_found_wrong_is_out_of_service_under_all_its_questions(source: Source) -> None:
    """Until two fresh answers have said the same; other answers are served meanwhile."""
    stream = Stream(0.02, 1)
    stream.run(3000, 40.0)
    policy = stream.policy

    def serves(answer: str) -> bool:
        return policy.decide(policy.vote([(answer, 0.95), ("other", 0.5)])).serve

    served = policy.vote([("A", 0.95), ("other", 0.5)])
    decision = policy.decide(served)
    assert decision.serve
    found = Label.of(served, decision, False, source)
    policy.learn(found)
    assert [serves("A"), serves("B")] == [False, True]
    for _ in range(2):
        policy.learn(Label.of(served, policy.decide(served), True, "miss"))
    assert serves("A")


def test_more_wrong_answers_than_expected_make_all_risks_larger() -> None:
    """Misses show one thing and audits another: audits count. A judge who misses same answers is no reason for it."""
    for recall, more in ((1.0, True), (0.9, False)):
        judged = dice(1)
        policy = BudgetPolicy(0.01, JudgeError(recall, 0.0), dice())
        hit = near(0.95)
        for turn in range(300):
            for _ in range(6):
                policy.learn(Label.of(hit, policy.decide(hit), judged.random() < recall, "miss"))
            decision = Decision(True, 0.02, policy.decide(hit).plain_risk, audit=True, audit_chance=0.5)
            policy.learn(Label.of(hit, decision, turn % 10 != 0, "audit"))
        assert (policy.inflation > 1.1) == more


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0.3, 1.0), st.booleans()), min_size=1, max_size=400), st.floats(0.0005, 0.1))
def test_the_ledger_holds_for_what_was_expected(asked: list[tuple[float, bool]], delta: float) -> None:
    """Whoever asks and whatever is said of it: the risks that were served add up to the budget at most, but for one."""
    policy = BudgetPolicy(delta, JudgeError(1.0, 0.0), dice())
    spent = 0.0
    for similarity, same in asked:
        evidence = near(similarity)
        decision = policy.decide(evidence)
        if decision.serve:
            spent += risk_of(decision)
            if decision.audit:
                policy.learn(Label.of(evidence, decision, same, "audit"))
        else:
            policy.learn(Label.of(evidence, decision, same, "miss"))
    assert spent <= delta * len(asked) * 1.5 + 25 * max_risk(delta)


def test_a_complaint_counts_by_its_chance_of_having_been_an_audit() -> None:
    """Twenty complaints of hits that were audited once in twenty times teach as much as one audit, not as twenty."""

    def taught(*labels: Label) -> BudgetPolicy:
        policy = BudgetPolicy(0.01, JudgeError(1.0, 0.0), dice())
        for _ in range(300):
            policy.learn(Label.of(near(0.95), policy.decide(near(0.95)), True, "miss"))
        for label in labels:
            policy.learn(label)
        return policy

    features = tuple(near(0.95).features.tolist())
    complaint = Label("complained", features, False, "user", 0.0, 0.05)
    audit = Label("audited", features, False, "audit", 0.0, 0.05)
    nothing, complaints, audited = taught(), taught(*[complaint] * 20), taught(audit)
    assert complaints.inflation == nothing.inflation
    risks = [policy.learned.posterior.wrong(near(0.95).features, 0.0) for policy in (nothing, complaints, audited)]
    assert risks[0] < risks[1] < 2.5 * risks[2]


def test_requests_that_are_sent_twice_do_not_end_the_hits() -> None:
    """A button that many people press: repeats are no proof, however many, and nothing is said to be wrong."""
    shares = []
    for repeated in (0.0, 0.5):
        stream, chance = Stream(0.01, 3), dice(9)
        for _ in range(4000):
            before = stream.hits
            similarity = stream.chance.uniform(0.5, 1.0)
            stream.ask(similarity, right_at(similarity, 40.0))
            if stream.hits > before and chance.random() < repeated:
                evidence = near(similarity, entry=f"again {stream.requests}")
                decision = stream.policy.decide(evidence, max_risk=0.0)
                stream.tell(Label.of(evidence, Decision(True, 0.01, decision.plain_risk, False, 0.05), False, "user"))
                stream.tell(Label.of(evidence, decision, True, "miss"))
        shares.append(stream.hits / stream.requests)
        assert stream.policy.figures()["wrong"] <= 0.01
        assert stream.policy.inflation <= 2.0
    assert shares[1] > 0.5 * shares[0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0), st.booleans()), max_size=150),
    st.sampled_from([JudgeError(1.0, 0.0), JudgeError(0.9, 0.1)]),
    st.floats(0.0, 1.0),
)
def test_what_a_decision_says_can_be_shown(
    asked: list[tuple[float, float, bool]], judge: JudgeError, share: float
) -> None:
    """A risk is a probability, never below what the posterior says; only what is served is audited, by its chance."""
    policy = BudgetPolicy(0.3, judge, dice(), share)
    for number, (one, other, same) in enumerate(asked):
        evidence = near(max(one, other), min(one, other), str(number % 7))
        decision = policy.decide(evidence)
        assert 0.0 <= decision.plain_risk <= risk_of(decision) <= 1.0
        assert 0.0 <= decision.audit_chance <= 1.0
        assert decision.serve or decision.audit_chance == 0.0
        assert decision.audit_chance > 0.0 or not decision.audit
        label = Label.of(evidence, decision, same, "audit" if decision.audit else "miss")
        policy.learn(label)
        policy.settle(label)
    assert all(np.isfinite(list(policy.figures().values())))


def test_figures_are_corrected_by_the_errors_of_the_judges() -> None:
    """A judge who misses four of ten same answers makes that many audits look wrong, and is known to."""
    believed, known = (BudgetPolicy(0.01, JudgeError(1.0, 0.0), dice()) for _ in range(2))
    for number in range(400):
        for policy, judge in ((believed, None), (known, JudgeError(0.6, 0.0))):
            policy.tallies.count_request(Decision(True, 0.01, 0.01, audit=True, audit_chance=1.0))
            label = Label("e", (), number % 10 < 6, "audit", 0.01, 1.0, judge=judge)
            policy.settle(label)
    assert believed.figures()["wrong"] == pytest.approx(0.4, abs=0.01)
    assert known.figures()["wrong"] < 0.02


def test_each_label_is_as_sure_as_who_judged_it() -> None:
    """The same judgements teach as much whether their judge's error comes with each of them or is that of all."""
    judge = JudgeError(0.7, 0.05)
    of_all, of_each = BudgetPolicy(0.01, judge, dice()), BudgetPolicy(0.01, JudgeError(1.0, 0.0), dice())
    for same in (True, False, True, True):
        label = Label.of(near(0.9), of_all.decide(near(0.9)), same, "miss")
        of_all.learn(label)
        of_each.learn(msgspec.structs.replace(label, judge=judge))
    assert of_each.snapshot() == of_all.snapshot()
