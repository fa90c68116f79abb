"""What was learned survives a restart, and nothing else passes for it."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.policy import state as state_module
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.calibration import Calibration
from cache.semantic.policy.policy import LABEL, JudgeError, Label, Policy
from cache.semantic.policy.posterior import FEATURES, Posterior
from cache.semantic.policy.state import VERSION, UnusableState, freeze, thaw
from tests.cache.semantic.policy.streams import Stream, dice, near

PRIOR = Posterior()


def made() -> BudgetPolicy:
    return BudgetPolicy(0.01, JudgeError(1.0, 0.0), dice())


def taught() -> BudgetPolicy:
    policy = made()
    for turn in range(200):
        evidence = near(0.5 + turn % 50 / 100)
        policy.learn(Label.of(evidence, policy.decide(evidence), evidence.similarity > 0.75, "miss"))
    return policy


def risks(policy: Policy) -> list[float | None]:
    return [policy.decide(policy.vote(_one(similarity))).risk for similarity in (0.6, 0.75, 0.8, 0.9, 0.99)]


def _one(similarity: float) -> list[tuple[str, float]]:
    return [("one", similarity), ("other", 0.5)]


def test_a_restored_policy_knows_what_the_saved_one_knew() -> None:
    """Its risks are the same; and saved again it is the same state, to the byte."""
    saved = taught()
    state = saved.snapshot()
    restored = made()
    restored.restore(state)
    assert risks(restored) == risks(saved)
    assert restored.snapshot() == state


def test_damaged_state_is_refused_wherever_it_is_damaged() -> None:
    """One bit is enough, and so is a missing end; the policy goes on with what it knew."""
    policy = taught()
    state = policy.snapshot()
    known = risks(policy)
    chance = dice(1)
    for place in [chance.randrange(len(state)) for _ in range(200)]:
        damaged = bytearray(state)
        damaged[place] ^= 1 << chance.randrange(8)
        with pytest.raises(UnusableState):
            policy.restore(bytes(damaged))
    for end in (0, 1, 5, len(state) - 1):
        with pytest.raises(UnusableState):
            policy.restore(state[:end])
    assert risks(policy) == known


def test_the_state_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(UnusableState, match="'label'"):
        made().restore(freeze("label", made().learned))


def test_state_from_the_future_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is older cannot know what it means."""
    policy = made()
    with monkeypatch.context() as later:
        later.setattr(state_module, "VERSION", VERSION + 1)
        state = policy.snapshot()
    with pytest.raises(UnusableState, match=f"version {VERSION + 1}"):
        policy.restore(state)


def _with(**changes: object) -> tuple[object, ...]:
    """As a posterior is written down, which is an array of its fields."""
    return tuple(changes.get(name, getattr(PRIOR, name)) for name in PRIOR.__struct_fields__)


EYE = np.eye(FEATURES)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (_with(mean=PRIOR.mean * math.nan), "finite"),
        (_with(mean=PRIOR.mean[1:]), f"of {FEATURES} features"),
        (_with(mean="mean"), "string"),
        (_with(mean={}), "float"),
        (_with(covariance=[[1.0, 0.0], [1.0]]), "shape"),
        (_with(covariance=EYE + np.inf), "finite"),
        (_with(covariance=EYE + np.eye(FEATURES, k=1) / 2), "symmetric"),
        (_with(covariance=-EYE), "positive definite"),
        (_with(covariance=np.full((FEATURES, FEATURES), 0.5)), "positive definite"),
        (_with(covariance=9 * EYE), "no wider"),
        (_with(labels=-1), ">= 0"),
    ],
)
def test_impossible_numbers_are_refused_although_the_checksum_is_right(broken: tuple[object, ...], why: str) -> None:
    """Not finite, no covariance, wider than ignorance: somebody else wrote them, or a fault did."""
    policy = made()
    with pytest.raises(UnusableState, match=why):
        policy.restore(freeze("budget", (broken, Calibration(), ({},), policy.learned.reliability)))


@pytest.mark.parametrize("penalties", [{"a": -1.0}, {"a" * 513: 1.0}, {str(n): 1.0 for n in range(5000)}])
def test_penalties_that_cannot_have_been_are_refused(penalties: dict[str, float]) -> None:
    learned = made().learned
    with pytest.raises(UnusableState, match=r"length|> 0"):
        made().restore(freeze("budget", (PRIOR, learned.calibration, (penalties,), learned.reliability)))


def test_processes_that_hear_the_same_know_the_same() -> None:
    """Who served and audited, and who only heard the labels from Redis, end with equal states and equal risks."""
    stream = Stream(0.02, 3, JudgeError(0.98, 0.01), complaints=0.3)
    stream.run(2500, 40.0)
    assert {label.source for label in stream.labels} == {"miss", "audit", "user"}
    other = BudgetPolicy(0.02, JudgeError(0.98, 0.01), dice(99))
    for label in stream.labels:
        other.learn(thaw(freeze(LABEL, label), LABEL, Label))
    assert other.snapshot() == stream.policy.snapshot()


def test_a_restart_gives_no_budget_away() -> None:
    """A process that has just begun has saved nothing up: it serves again only as its requests bring budget."""
    stream = Stream(0.01, 3)
    stream.run(3000, 40.0)
    restarted = BudgetPolicy(0.01, JudgeError(1.0, 0.0), dice())
    restarted.restore(stream.policy.snapshot())
    spent, chance = 0.0, dice(5)
    for asked in range(1, 401):
        decision = restarted.decide(near(chance.uniform(0.5, 1.0)))
        if decision.serve:
            spent += decision.risk or 0.0
        assert spent <= 0.01 * asked * 1.5 + 0.05
    assert spent > 0


LABELS = st.builds(
    Label,
    answer=st.text(max_size=40),
    features=st.lists(st.floats(-100, 100), max_size=8).map(tuple),
    same=st.booleans(),
    source=st.sampled_from(["miss", "audit", "user"]),
    risk=st.floats(0, 1),
    chance=st.floats(0.001, 1),
    judge=st.none() | st.builds(JudgeError, st.floats(0.5, 1), st.floats(0, 0.4)),
)


@settings(max_examples=60, deadline=None)
@given(LABELS)
def test_a_label_travels_unchanged(label: Label) -> None:
    assert thaw(freeze(LABEL, label), LABEL, Label) == label


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.builds(lambda label, end: freeze(LABEL, label)[:end], LABELS, st.integers(0, 40)))
def test_bytes_that_are_no_label_are_refused(data: bytes) -> None:
    """Whatever they are, there is one error for it."""
    with pytest.raises(UnusableState):
        thaw(data, LABEL, Label)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("risk", math.nan),
        ("risk", 1.5),
        ("chance", math.inf),
        ("features", (math.nan,)),
        ("features", (1.0, -1e160)),
        ("features", (100.001,)),
    ],
)
def test_a_label_has_numbers_as_evidence_has_them(field: str, value: object) -> None:
    """NaN in a posterior is for ever, and so is what overflows."""
    label = Label("e", (1.0,), True, "miss")
    fields = [value if name == field else getattr(label, name) for name in label.__struct_fields__]
    with pytest.raises(UnusableState, match=r"within ±100|= [01]\.0"):
        thaw(freeze(LABEL, fields), LABEL, Label)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from([-100.0, -1.0, 0.0, 100.0])] * FEATURES), min_size=1, max_size=4))
def test_whatever_labels_say_the_policy_can_be_saved(extremes: list[tuple[float, ...]]) -> None:
    """The farthest features that a label may have, again and again, right and wrong."""
    policy = made()
    for turn in range(210):
        features = extremes[turn % len(extremes)]
        policy.learn(Label("e", features, turn % 3 == 0, "miss"))
    made().restore(policy.snapshot())


def test_a_label_of_other_features_is_refused_and_teaches_nothing() -> None:
    """Such as one from a host that runs another policy."""
    policy = made()
    before = policy.snapshot()
    with pytest.raises(UnusableState, match="3 features"):
        policy.learn(Label("e", (1.0, 2.0, 3.0), True, "audit", 0.1, 0.5))
    assert policy.snapshot() == before


@pytest.mark.parametrize("content", [b"\x91" * 100_000 + b"\xc0", b"\x95" + b"\x91" * 100_000 + b"\xc0"])
def test_nesting_without_end_is_refused(content: bytes) -> None:
    """As content of a label, or within one: it is as unusable as anything else that does not decode."""
    with pytest.raises(UnusableState, match="label"):
        thaw(freeze(LABEL, msgspec.Raw(content)), LABEL, Label)
