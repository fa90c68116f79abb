"""The same answer every time: whatever else runs, and however the work is cut, a greedy answer keeps every bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.batching import Batching, BatchingMode
from backend.engine import Engine
from backend.fused_layout import KVPrecision, Precision
from backend.runner import ModelRunner
from backend.sequence import FinishReason
from tests.backend.tiny_model import Said, Talk, alone, fused, reference

NUM_BLOCKS = 9


@dataclass(frozen=True)
class Ask:
    """One request: when it comes, what it asks, and after how many of its outputs its client leaves."""

    arrives: int
    prompt: tuple[int, ...]
    answer: int
    priority: int
    salt: str
    pooled: bool
    leaves_after: int | None


# Few beginnings, so that prompts have whole blocks in common, and few different ends.
PROMPTS = st.builds(
    lambda family, common, tail: tuple((family * 31 + i * 7) % 90 + 10 for i in range(common)) + tuple(tail),
    st.integers(0, 1),
    st.sampled_from([0, 15, 16, 17, 32, 48, 60]),
    st.lists(st.integers(10, 12), min_size=1, max_size=20),
)
ASKS = st.builds(
    Ask,
    arrives=st.integers(0, 12),
    prompt=PROMPTS,
    answer=st.integers(1, 20),
    priority=st.integers(0, 1),
    salt=st.sampled_from(["", "", "tenant"]),
    pooled=st.sampled_from([False, False, False, True]),
    leaves_after=st.none() | st.integers(1, 6),
)

KNOWN: dict[tuple[tuple[int, ...], int, bool], Said] = {}


# Weights, and keys and values.
PRECISIONS: tuple[tuple[Precision, KVPrecision], ...] = (
    ("float16", "float16"),
    ("int8", "int8"),
    ("int4", "float16"),
)


@pytest.fixture(scope="module", params=PRECISIONS, ids=lambda precisions: "-".join(precisions))
def precisions(request: pytest.FixtureRequest) -> tuple[Precision, KVPrecision]:
    KNOWN.clear()
    chosen: tuple[Precision, KVPrecision] = request.param
    return chosen


@pytest.fixture(scope="module")
def runner(precisions: tuple[Precision, KVPrecision]) -> ModelRunner:
    return fused(NUM_BLOCKS, *precisions)


@pytest.fixture(scope="module")
def quiet_runner(precisions: tuple[Precision, KVPrecision]) -> ModelRunner:
    """Where requests run alone, with memory of its own."""
    return fused(NUM_BLOCKS, *precisions)


def expected(runner: ModelRunner, ask: Ask) -> Said:
    key = (ask.prompt, ask.answer, ask.pooled)
    if key not in KNOWN:
        KNOWN[key] = alone(runner, list(ask.prompt), ask.answer, pooled=ask.pooled)
    return KNOWN[key]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asks=st.lists(ASKS, min_size=1, max_size=8),
    max_batch=st.integers(1, 5),
    step_tokens=st.integers(1, 80),
    shares=st.booleans(),
    mode=st.sampled_from(BatchingMode),
)
def test_no_schedule_changes_a_bit(
    asks: list[Ask],
    max_batch: int,
    step_tokens: int,
    shares: bool,
    mode: BatchingMode,
    runner: ModelRunner,
    quiet_runner: ModelRunner,
) -> None:
    """Text, log-probabilities and embeddings are what they are alone, for those who stay to the end."""
    assert runner.deterministic
    talk = Talk(Engine(runner, max_batch, step_tokens, Batching(mode), shares))
    left: set[int] = set()
    outputs_of = dict.fromkeys(range(len(asks)), 0)
    now = 0
    while now <= 12 or talk.engine.has_work:
        for number, ask in enumerate(asks):
            if ask.arrives == now:
                talk.say(number, list(ask.prompt), ask.answer, priority=ask.priority, salt=ask.salt, pooled=ask.pooled)
        for output in talk.step():
            number = output.sequence_id
            outputs_of[number] += 1
            if outputs_of[number] == asks[number].leaves_after and output.finish_reason is None:
                talk.engine.abort(number)
                left.add(number)
        now += 1
    assert talk.engine.pool.num_free == NUM_BLOCKS
    for number, ask in enumerate(asks):
        said, wanted = talk.said[number], expected(quiet_runner, ask)
        if number in left:
            assert wanted.text.startswith(said.text)
            assert wanted.logprobs[: len(said.logprobs)] == said.logprobs
            continue
        assert said.content == wanted.content
        assert said.last is not None
        assert wanted.last is not None
        if ask.pooled:
            assert said.last.embedding is not None
            assert wanted.last.embedding is not None
            assert said.last.embedding.tobytes() == wanted.last.embedding.tobytes()


def test_the_schedules_do_what_they_are_made_for(runner: ModelRunner) -> None:
    """The same kind of requests does share, does preempt, and does get to its end."""
    talk = Talk(Engine(runner, max_batch=4, step_tokens=24))
    for number in range(6):
        talk.say(number, [*range(20, 68), 11 + number], 20, ignore_eos=True)
    talk.run()
    stats = talk.engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 48
    assert stats.computed_rows > stats.useful_rows
    assert all(said.last and said.last.finish_reason is FinishReason.LENGTH for said in talk.said.values())


@pytest.mark.parametrize("make", [fused, reference])
def test_a_runner_says_whether_it_promises_this(make: Callable[[int], ModelRunner]) -> None:
    """The engine's picture of itself repeats it."""
    runner = make(4)
    assert Engine(runner, 1, 16).stats().deterministic is runner.deterministic


def test_the_reference_says_the_same_up_to_rounding() -> None:
    """Its sums may round differently in another batch, so it promises nothing; the words agree here all the same."""
    runner = reference(40)
    assert not runner.deterministic
    prompts = [[*range(20, 60), 11 + number] for number in range(4)]
    wanted = [alone(runner, prompt).text for prompt in prompts]
    talk = Talk(Engine(runner, max_batch=4, step_tokens=24))
    for number, prompt in enumerate(prompts):
        talk.say(number, prompt)
    talk.run()
    assert [talk.said[number].text for number in range(4)] == wanted
