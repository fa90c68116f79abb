"""A greedy answer is bitwise the same whatever else runs and however the work is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.config import Batching, BatchingMode
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner
from backend.engine.sequence import FinishReason
from backend.runners.fused.layout import KVPrecision
from tests.backend.engine.schedules import (
    Options,
    ScheduledRequest,
    SchedulePair,
    assert_same_as_alone,
    run_schedule,
    schedule_pair,
    schedules,
)
from tests.backend.tiny_model import EngineClient, alone, fused, reference

OPTIONS: st.SearchStrategy[Options] = st.fixed_dictionaries(
    {"tenant": st.sampled_from(["", "", "tenant"]), "pooled": st.sampled_from([False, False, False, True])}
)
# Weights, and keys and values.
PRECISIONS: tuple[tuple[str, KVPrecision], ...] = (
    ("float16", "float16"),
    ("int8", "int8"),
    ("int4", "float16"),
    ("fp8", "float16"),
    ("nf4", "float16"),
    ("mixed", "int8"),
    ("act-order", "float16"),
)


@pytest.fixture(scope="module", params=PRECISIONS, ids=lambda precisions: "-".join(precisions))
def on(request: pytest.FixtureRequest) -> SchedulePair:
    return schedule_pair(*request.param)


@pytest.mark.timeout(600)  # a failure is worth the five minutes that hypothesis may take to make it small
@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=schedules(OPTIONS, longest_answer=20),
    max_batch=st.integers(1, 5),
    step_tokens=st.integers(1, 80),
    shares=st.booleans(),
    mode=st.sampled_from(BatchingMode),
)
def test_no_schedule_changes_a_bit(
    requests: list[ScheduledRequest],
    max_batch: int,
    step_tokens: int,
    shares: bool,
    mode: BatchingMode,
    on: SchedulePair,
) -> None:
    """Completed requests get bitwise the text, log-probabilities and embeddings that they get alone."""
    assert on.runner.deterministic
    client, left = run_schedule(Engine(on.runner, max_batch, step_tokens, Batching(mode), shares), requests)
    assert_same_as_alone(on, requests, client, left)


def test_the_schedules_share_preempt_and_end(on: SchedulePair) -> None:
    """Requests of this kind share prefixes, are preempted, and reach their end."""
    client = EngineClient(Engine(on.runner, max_batch=4, step_tokens=24))
    for number in range(6):
        client.submit(number, [*range(20, 68), 11 + number], 20, ignore_eos=True)
    client.run()
    stats = client.engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_cache_hits > 48
    assert stats.computed_rows > stats.first_time_rows
    assert all(c.last and c.last.finish_reason is FinishReason.LENGTH for c in client.completions.values())


@pytest.mark.parametrize("make", [fused, reference])
def test_stats_repeat_whether_the_runner_is_deterministic(make: Callable[[int], ModelRunner]) -> None:
    """The engine's stats repeat whether its runner is deterministic."""
    runner = make(4)
    assert Engine(runner, 1, 16).stats().deterministic is runner.deterministic


def test_the_reference_says_the_same_up_to_rounding() -> None:
    """The reference runner is not deterministic, and its greedy texts still agree with those alone."""
    runner = reference(40)
    assert not runner.deterministic
    prompts = [[*range(20, 60), 11 + number] for number in range(4)]
    expected = [alone(runner, prompt).text for prompt in prompts]
    client = EngineClient(Engine(runner, max_batch=4, step_tokens=24))
    for number, prompt in enumerate(prompts):
        client.submit(number, prompt)
    client.run()
    assert [client.completions[number].text for number in range(4)] == expected
