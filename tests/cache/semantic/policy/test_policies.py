"""What every policy promises, and what the two simple ones do."""

import math

import pytest

from cache.semantic.policy import vcache
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import Neighbourhood, Policy
from cache.semantic.policy.posterior import JudgeError
from cache.semantic.policy.threshold import ThresholdPolicy
from cache.semantic.policy.vcache import VCachePolicy
from tests.cache.semantic.policy.streams import dice, label_of


def make(name: str) -> Policy:
    match name:
        case "budget":
            return BudgetPolicy(0.01, JudgeError(), dice())
        case "vcache":
            return VCachePolicy(0.01, dice())
    return ThresholdPolicy(0.9)


def one(similarity: float, entry: str = "near") -> Neighbourhood:
    return Neighbourhood([entry, "rival"], [similarity, 0.4], ["one", "other"])


@pytest.fixture(params=["budget", "vcache", "threshold"])
def policy(request: pytest.FixtureRequest) -> Policy:
    made = make(request.param)
    truth = dice(1)
    for _ in range(600):
        evidence = made.weigh(one(truth.uniform(0.5, 1.0)))
        decision = made.decide(evidence)
        if not decision.serve or decision.audit:
            made.learn(label_of(evidence, decision, evidence.similarity > 0.8, "audit" if decision.serve else "miss"))
    return made


def test_a_near_neighbour_is_served_and_a_far_one_is_not(policy: Policy) -> None:
    """Once it is known, or set, that near answers are right and far ones wrong; vCache spends delta on anything."""
    served = {
        similarity: sum(policy.decide(policy.weigh(one(similarity))).serve for _ in range(50))
        for similarity in (0.55, 0.7, 0.99)
    }
    assert served[0.99] > 25
    assert served[0.7] + served[0.55] < 8


def test_without_evidence_nothing_is_served(policy: Policy) -> None:
    """No neighbour, or none that the guards let pass."""
    assert not any(policy.decide(None).serve for _ in range(100))


def test_a_caller_who_allows_no_risk_gets_nothing(policy: Policy) -> None:
    """From those who know the risk because there is always some, and from those who do not know it because of that."""
    assert not any(policy.decide(policy.weigh(one(0.99)), max_risk=0.0).serve for _ in range(100))


def test_an_assessment_foretells_and_changes_nothing(policy: Policy) -> None:
    """What is served by chance aside, it says what `decide` does, and the sentence for it."""
    before = policy.snapshot(), policy.figures()
    near, far = (policy.assess(policy.weigh(one(similarity))) for similarity in (0.99, 0.55))
    none = policy.assess(policy.weigh(one(0.99)), max_risk=0.0)
    assert (policy.snapshot(), policy.figures()) == before
    assert (near.serve, far.serve, none.serve) == (True, False, False)
    assert all(each.reason for each in (near, far, none))
    decision = policy.decide(policy.weigh(one(0.99)))
    assert near.risk == decision.risk


def test_weighing_names_neighbours_with_one_answer(policy: Policy) -> None:
    """The nearest of them is the entry that is spoken of."""
    neighbourhood = Neighbourhood(["a", "b", "c"], [0.95, 0.94, 0.93], ["7", "7", "2"])
    evidence = policy.weigh(neighbourhood)
    assert evidence.entry == neighbourhood.entries[evidence.members[0]] == "a"
    assert {neighbourhood.answers[place] for place in evidence.members} == {"7"}
    assert evidence.similarity == 0.95


def test_a_threshold_is_a_threshold() -> None:
    """At it, and not below it; it knows no risk."""
    policy = ThresholdPolicy(0.9)
    assert policy.decide(policy.weigh(one(0.9))).serve
    assert not policy.decide(policy.weigh(one(math.nextafter(0.9, 0.0)))).serve
    assert policy.decide(policy.weigh(one(0.9))).risk is None


@pytest.mark.parametrize("delta", [0.05, 0.02])
@pytest.mark.parametrize("steepness", [15.0, 60.0])
def test_vcache_keeps_each_entrys_error(delta: float, steepness: float) -> None:
    """Over many entries with boundaries of their own: wrong answers stay within delta, and the near ones are served."""
    policy, truth = VCachePolicy(delta, dice(2)), dice(3)
    requests = hits = wrong = 0
    for entry in range(25):
        boundary = truth.uniform(0.6, 0.9)
        for _ in range(160):
            evidence = policy.weigh(one(truth.uniform(0.5, 1.0), str(entry)))
            right = truth.random() < 1 / (1 + math.exp(-steepness * (evidence.similarity - boundary)))
            requests += 1
            decision = policy.decide(evidence)
            if decision.serve:
                hits += 1
                wrong += not right
            else:
                policy.learn(label_of(evidence, decision, right, "miss"))
    assert wrong / requests <= delta
    assert hits / requests > 0.02


def test_vcache_knows_each_entry_by_itself() -> None:
    """What one has shown serves no other."""
    policy = VCachePolicy(0.05, dice())
    for similarity in range(50, 100):
        evidence = policy.weigh(one(similarity / 100, "known"))
        policy.learn(label_of(evidence, policy.decide(evidence), similarity > 70, "miss"))
    assert sum(policy.decide(policy.weigh(one(0.99, "known"))).serve for _ in range(50)) > 10
    assert not any(policy.decide(policy.weigh(one(0.99, "new"))).serve for _ in range(50))


def test_vcache_forgets_the_entry_that_was_labelled_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many are known and saved, and no more; a restored one goes on in the same order."""
    monkeypatch.setattr(vcache, "_MAX_ENTRIES", 3)
    policy, restored = VCachePolicy(0.05, dice()), VCachePolicy(0.05, dice())

    def learn(of: VCachePolicy, *entries: str) -> None:
        for entry in entries:
            evidence = of.weigh(one(0.9, entry))
            of.learn(label_of(evidence, of.decide(None), True, "miss"))

    def known(of: VCachePolicy) -> set[str]:
        return {entry for entry in "abcdef" if of.decide(of.weigh(one(0.9, entry))).risk != 1.0}

    learn(policy, "a", "b", "c", "a", "d")
    assert known(policy) == {"c", "a", "d"}
    restored.restore(policy.snapshot())
    for each in (policy, restored):
        learn(each, "e")
        assert known(each) == {"a", "d", "e"}
    assert restored.snapshot() == policy.snapshot()
    monkeypatch.setattr(vcache, "_MAX_ENTRIES", 2)
    restored.restore(policy.snapshot())
    assert known(restored) == {"d", "e"}, "more than are kept now"
