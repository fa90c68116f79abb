"""What every policy promises, and what the simple one does."""

import math

import pytest

from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import JudgeError, Label, Policy, ThresholdPolicy
from tests.cache.semantic.policy.streams import dice


def make(name: str) -> Policy:
    return BudgetPolicy(0.01, JudgeError(1.0, 0.0), dice()) if name == "budget" else ThresholdPolicy(0.9)


def one(similarity: float) -> list[tuple[str, float]]:
    return [("one", similarity), ("other", 0.4)]


@pytest.fixture(params=["budget", "threshold"])
def policy(request: pytest.FixtureRequest) -> Policy:
    made = make(request.param)
    truth = dice(1)
    for _ in range(600):
        evidence = made.vote(one(truth.uniform(0.5, 1.0)))
        decision = made.decide(evidence)
        if not decision.serve or decision.audit:
            made.learn(Label.of(evidence, decision, evidence.similarity > 0.8, "audit" if decision.serve else "miss"))
    return made


def test_a_near_neighbour_is_served_and_a_far_one_is_not(policy: Policy) -> None:
    """Once it is known, or set, that near answers are right and far ones wrong."""
    served = {
        similarity: sum(policy.decide(policy.vote(one(similarity))).serve for _ in range(50))
        for similarity in (0.55, 0.7, 0.99)
    }
    assert served[0.99] > 25
    assert served[0.7] + served[0.55] < 8


def test_without_evidence_nothing_is_served(policy: Policy) -> None:
    """No neighbour, or none that the vetoes let pass."""
    assert not any(policy.decide(None).serve for _ in range(100))


def test_a_caller_who_allows_no_risk_gets_nothing(policy: Policy) -> None:
    """From those who know the risk because there is always some, and from those who do not know it because of that."""
    assert not any(policy.decide(policy.vote(one(0.99)), max_risk=0.0).serve for _ in range(100))


def test_an_assessment_foretells_and_changes_nothing(policy: Policy) -> None:
    """What is served by chance aside, it says what `decide` does, and the sentence for it."""
    before = policy.snapshot(), policy.figures()
    evidence, distant = policy.vote(one(0.99)), policy.vote(one(0.55))
    asked = [(evidence, 1.0), (distant, 1.0), (evidence, 0.0)]
    found = [policy.assess(each, max_risk) for each, max_risk in asked]
    reasons = [policy.reason(each, seen, limit) for (each, limit), seen in zip(asked, found, strict=True)]
    parts = policy.features(evidence)
    assert (policy.snapshot(), policy.figures()) == before
    assert [decision.serve for decision in found] == [True, False, False]
    assert all(reasons)
    decision = policy.decide(evidence)
    assert found[0].risk == decision.risk
    assert (decision.risk is None) == (parts == ())


def test_the_features_add_up_to_the_risk() -> None:
    """Before the correction by judgements, the largest first; what says nothing is left out."""
    policy = make("budget")
    truth = dice(1)
    for _ in range(200):
        evidence = policy.vote(one(truth.uniform(0.5, 1.0)))
        policy.learn(Label.of(evidence, policy.decide(evidence), evidence.similarity > 0.8, "miss"))
    for evidence in (policy.vote(one(0.9)), policy.vote(one(0.9)).with_texts((1.0, 0.0, 0.5, -0.3, 0.25, 0.09))):
        parts = policy.features(evidence)
        sizes = [abs(part.log_odds) for part in parts]
        assert sizes == sorted(sizes, reverse=True)
        assert all(part.value and part.log_odds == part.value * part.weight for part in parts)
        odds = math.exp(math.fsum(part.log_odds for part in parts))
        assert odds / (1 + odds) == pytest.approx(policy.decide(evidence).plain_risk)
    weights = {part.name: part.weight for part in parts}
    assert "inserted" not in weights
    assert weights["replaced"] > 0 > weights["similarity"], "a new word makes it riskier, nearness less risky"


def test_weighing_names_neighbours_with_one_answer(policy: Policy) -> None:
    """The nearest of them is the one that is spoken of."""
    neighbours = [("7", 0.95), ("7", 0.94), ("2", 0.93)]
    evidence = policy.vote(neighbours)
    assert evidence.members[0] == 0
    assert {neighbours[place][0] for place in evidence.members} == {evidence.answer} == {"7"}
    assert evidence.similarity == 0.95


def test_a_threshold_is_a_threshold() -> None:
    """At it, and not below it; it knows no risk."""
    policy = ThresholdPolicy(0.9)
    assert policy.decide(policy.vote(one(0.9))).serve
    assert not policy.decide(policy.vote(one(math.nextafter(0.9, 0.0)))).serve
    assert policy.decide(policy.vote(one(0.9))).risk is None
