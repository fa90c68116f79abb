"""With drafts, right or wrong, an answer is bitwise what it is without them, whatever else runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.config import Batching, BatchingMode
from backend.engine.engine import Engine
from backend.runners.fused.layout import KVPrecision
from backend.speculation.draft_model import DraftModel
from tests.backend.engine.schedules import (
    NUM_BLOCKS,
    Options,
    ScheduledRequest,
    SchedulePair,
    assert_same_as_alone,
    run_schedule,
    schedule_pair,
    schedules,
)
from tests.backend.speculation.drafting import VOCABULARY, Foresight, eager, random_heads
from tests.backend.tiny_model import CONFIG, END, POISON, EngineClient, alone, fused, reference

# All that changes the next token, and all that ends an answer. `min_p` keeps draws among few tokens, so that some of
# the answers repeat themselves and are found again.
OPTIONS: st.SearchStrategy[Options] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "tenant": st.sampled_from(["", "tenant"]),
            "presence_penalty": st.sampled_from([0.0, 1.5]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
            "min_tokens": st.sampled_from([0, 6]),
            "stop": st.sampled_from([(), ("a",), ("bc", "de")]),
            "logit_bias": st.sampled_from([{}, {END: 4.0}, {40: 8.0, 41: 8.0}]),
            "logprobs": st.sampled_from([None, 2]),
        }
    ),
    st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0]),
            "min_p": st.sampled_from([0.0, 0.3]),
            "top_k": st.sampled_from([0, 5]),
            "seed": st.just(1),
        }
    ),
    st.just({"pooled": True}),
    st.just({"prompt_logprobs": 1}),
)
PRECISIONS: tuple[tuple[str, KVPrecision], ...] = (("float16", "float16"), ("int8", "int8"), ("int4", "float16"))


@pytest.fixture(scope="module", params=PRECISIONS, ids=lambda precisions: "-".join(precisions))
def on(request: pytest.FixtureRequest) -> SchedulePair:
    return schedule_pair(*request.param)


SCHEDULE = {
    "requests": schedules(OPTIONS, longest_answer=24),
    "max_batch": st.integers(1, 5),
    "step_tokens": st.integers(1, 80),
    "shares": st.booleans(),
    "mode": st.sampled_from(BatchingMode),
}


@pytest.mark.timeout(600)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**SCHEDULE, seed=st.integers(0, 1000), branches=st.booleans())
def test_drafts_that_are_partly_right_change_nothing(
    requests: list[ScheduledRequest],
    max_batch: int,
    step_tokens: int,
    shares: bool,
    mode: BatchingMode,
    seed: int,
    branches: bool,
    on: SchedulePair,
) -> None:
    """Text, log-probabilities and ends are bitwise those of each request alone; every sequence is forgotten."""
    known = {number: on.expected(number, request).sequence.tokens for number, request in enumerate(requests)}
    foresight = Foresight(known, seed, branches=branches)
    engine = Engine(on.runner, max_batch, step_tokens, Batching(mode), shares, speculator=foresight)
    client, left = run_schedule(engine, requests)
    assert_same_as_alone(on, requests, client, left)
    assert foresight.forgotten == set(range(len(requests)))


@pytest.mark.timeout(600)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**SCHEDULE, has_model=st.booleans(), has_heads=st.booleans())
def test_found_and_written_drafts_change_nothing(
    requests: list[ScheduledRequest],
    max_batch: int,
    step_tokens: int,
    shares: bool,
    mode: BatchingMode,
    has_model: bool,
    has_heads: bool,
    on: SchedulePair,
) -> None:
    """The same with the real speculator: prompt lookup alone, with a draft model, with heads, and with both."""
    model = DraftModel(fused(NUM_BLOCKS, "int4"), VOCABULARY) if has_model else None
    speculator = eager(model, random_heads(CONFIG.hidden_size) if has_heads else None)
    engine = Engine(on.runner, max_batch, step_tokens, Batching(mode), shares, speculator=speculator)
    client, left = run_schedule(engine, requests)
    assert_same_as_alone(on, requests, client, left)


def test_most_of_a_right_draft_is_accepted() -> None:
    """An answer that is known takes a few steps; the counts say what was proposed and accepted."""
    runner = fused(40)
    prompt = [*range(20, 60)]
    expected = alone(runner, prompt, 30, ignore_eos=True)
    client = EngineClient(Engine(runner, max_batch=1, step_tokens=64, speculator=eager()))
    client.submit(0, prompt, 30, ignore_eos=True, prediction=expected.sequence.tokens[len(prompt) :])
    client.run()
    completion, stats = client.completions[0], client.engine.stats()
    assert completion.content == expected.content
    counts = stats.drafts["prediction"]
    assert counts.accepted_tokens == counts.proposed_tokens
    assert counts.accepted_tokens + stats.steps == 30
    assert stats.steps <= 3
    assert completion.last is not None
    assert completion.last.prediction_tokens == (counts.accepted_tokens, 0)


@pytest.mark.parametrize("branches", [False, True])
def test_states_are_those_that_the_tokens_were_sampled_from(branches: bool) -> None:
    """With drafts, accepted or not, each is bitwise the hidden state of a plain step before the same token."""
    runner = fused(40)
    prompt = [*range(20, 60)]
    plain, drafting = Foresight({}, 2), Foresight({}, 2, branches=branches)
    plain.propose = lambda *_: {}  # type: ignore[method-assign]
    for speculator in (plain, drafting):
        client = EngineClient(Engine(runner, max_batch=1, step_tokens=64, speculator=speculator))
        sequence = client.submit(0, prompt, 30, ignore_eos=True)
        client.run()
        drafting.known = {0: sequence.tokens}
    assert drafting.states[0].keys() < plain.states[0].keys()
    assert len(drafting.states[0]) > 2
    for place, state in drafting.states[0].items():
        assert torch.equal(state, plain.states[0][place])


def test_a_wrong_prediction_is_rejected_and_found_again() -> None:
    """After a difference the prediction goes on where the answer meets it; the usage counts both kinds of tokens."""
    runner = fused(40)
    prompt = [*range(20, 60)]
    expected = alone(runner, prompt, 40, ignore_eos=True)
    predicted = expected.sequence.tokens[len(prompt) :]
    predicted[12:15] = [150, 151]
    client = EngineClient(Engine(runner, max_batch=1, step_tokens=64, speculator=eager()))
    client.submit(0, prompt, 40, ignore_eos=True, prediction=predicted)
    client.run()
    completion = client.completions[0]
    assert completion.content == expected.content
    assert completion.last is not None
    accepted, rejected = completion.last.prediction_tokens
    assert rejected > 0
    assert accepted >= 25
    assert client.engine.stats().steps <= 8


def test_a_draft_with_a_token_that_poisons_its_row_is_rejected() -> None:
    """A proposed token whose values are not numbers ends no sequence and leaves nothing in the prefix cache."""
    runner = fused(40)
    prompt = [*range(20, 50)]
    expected = alone(runner, prompt, 20, ignore_eos=True)
    known = {0: expected.sequence.tokens[:34] + [POISON] * 20}
    client = EngineClient(Engine(runner, max_batch=1, step_tokens=64, speculator=Foresight(known, 3)))
    client.submit(0, prompt, 20, ignore_eos=True)
    client.run()
    assert client.completions[0].content == expected.content
    client.submit(1, prompt, 20, ignore_eos=True)
    client.run()
    assert client.completions[1].content == expected.content


def test_the_reference_says_the_same_with_drafts() -> None:
    """The torch runner rounds differently with more rows, and its greedy texts still agree."""
    runner = reference(40)
    prompts = [[*range(20, 60), 11 + number] for number in range(4)]
    expected = {number: alone(runner, prompt, 24) for number, prompt in enumerate(prompts)}
    known = {number: completion.sequence.tokens for number, completion in expected.items()}
    for speculator in (
        Foresight(known, 1),
        Foresight(known, 1, branches=True),
        eager(DraftModel(reference(40), VOCABULARY)),
    ):
        client = EngineClient(Engine(runner, max_batch=4, step_tokens=48, speculator=speculator))
        for number, prompt in enumerate(prompts):
            client.submit(number, prompt, 24)
        client.run()
        assert {n: c.text for n, c in client.completions.items()} == {n: c.text for n, c in expected.items()}
