"""The engine launches a step before it knows the last tokens, and no answer depends on that."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.engine.config import Batching, BatchingMode
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner, StepInput, StepOutput
from backend.engine.sequence import FinishReason
from backend.runners.fused.layout import KVPrecision
from backend.runners.torch.runner import TorchRunner
from tests.backend.engine.schedules import (
    Options,
    ScheduledRequest,
    assert_same_as_alone,
    run_schedule,
    schedule_pair,
    schedules,
)
from tests.backend.engine.soak import soak
from tests.backend.engine.test_engine_faults import Around
from tests.backend.speculation.drafting import VOCABULARY
from tests.backend.tiny_model import CONFIG, CONTEXT, POISON, EngineClient, alone, fused, weights


class Device(Around):
    """A runner whose results are read late: they are gone when the next step is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.ahead: list[bool] = []
        """Of each step, whether it was launched on tokens that the host did not know."""
        self.fails_at: int | None = None
        self._last: torch.Tensor | None = None

    def run(self, step: StepInput) -> StepOutput:
        if self._last is not None:
            self._last.fill_(torch.nan)
        self.ahead.append(step.device_tokens is not None)
        if len(self.ahead) == self.fails_at:
            raise torch.OutOfMemoryError("out of memory")
        if step.device_tokens is not None:
            assert not step.token_ids.any(), "the host does not know them"
            step = dataclasses.replace(step, token_ids=step.device_tokens.int().numpy(), device_tokens=None)
        output = self._runner.run(step)
        self._last = output.logits.clone()
        return StepOutput(self._last, output.hidden, unfinished=True)


# Half of the answers can be drawn ahead.
OPTIONS: st.SearchStrategy[Options] = st.sampled_from(
    [
        {},
        {},
        {"ignore_eos": True},
        {"stop": ("a", "cd")},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "ignore_eos": True},
        {"logprobs": 1},
        {"presence_penalty": 1.0},
        {"logit_bias": {20: 4.0}},
        {"pooled": True},
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=schedules(OPTIONS.map(lambda options: {"logprobs": None, **options}), longest_answer=24),
    max_batch=st.integers(1, 5),
    step_tokens=st.sampled_from([1, 17, 80, 400]),
    mode=st.sampled_from(BatchingMode),
)
def test_no_answer_depends_on_launching_ahead(
    requests: list[ScheduledRequest], max_batch: int, step_tokens: int, mode: BatchingMode
) -> None:
    """Every answer is the same as alone without launching ahead, whatever arrives, leaves, stops or is preempted."""
    on = schedule_pair()
    client, left = run_schedule(Engine(Device(on.runner), max_batch, step_tokens, Batching(mode)), requests)
    assert_same_as_alone(on, requests, client, left)


def plain(client: EngineClient, number: int, answer: int = 30, **options: Any) -> None:
    client.submit(number, [20 + number], answer, **{"logprobs": None, "ignore_eos": True, **options})


def test_steps_are_launched_before_the_last_tokens_are_known() -> None:
    """All steps but the first are launched ahead, and an answer of known length computes no surplus row."""
    device = Device(fused(20))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    plain(client, 0, 10)
    plain(client, 1, 6)
    launched = []
    while client.engine.has_work:
        client.step()
        launched.append(len(device.ahead) - client.completions[0].sequence.num_generated)
    assert device.ahead == [False] + [True] * 9
    assert launched == [1] * 9 + [0]
    stats = client.engine.stats()
    assert (stats.steps, stats.computed_rows, stats.first_time_rows) == (10, 16, 16)


@pytest.mark.parametrize(
    "options", [{"logprobs": 0}, {"frequency_penalty": 0.5}, {"logit_bias": {9: 1.0}}, {"prompt_logprobs": 0}]
)
def test_a_row_that_needs_the_host_keeps_its_batch_waiting(options: dict[str, Any]) -> None:
    """No step is launched ahead while a row needs the host's logits; once it has ended, steps are launched ahead."""
    device = Device(fused(20))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    plain(client, 0, 12)
    plain(client, 1, 4, **options)
    client.run()
    assert device.ahead == [False] * 5 + [True] * 7


def test_a_new_sequence_waits_for_one_step() -> None:
    """A new sequence waits for the step under way, and no further step is launched ahead before it has joined."""
    device = Device(fused(20))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    plain(client, 0)
    for _ in range(3):
        client.step()
    plain(client, 1)
    client.step()
    assert client.completions[1].sequence.num_computed == 0
    client.step()
    assert client.completions[1].sequence.num_generated == 1
    assert device.ahead == [False, True, True, True, False, True]


def test_a_sequence_that_waits_for_memory_stops_no_launching_ahead() -> None:
    """Steps are launched ahead while a sequence waits for memory that no running sequence has given back."""
    device = Device(fused(4))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    plain(client, 0, 33)
    client.submit(1, [*range(20, 69)], 4, logprobs=None)
    for _ in range(10):
        client.step()
    assert client.completions[1].sequence.started_at is None
    assert device.ahead[3:] == [True] * len(device.ahead[3:])
    client.run()
    assert client.completions[1].text == alone(fused(4), [*range(20, 69)], 4).text


def test_a_sequence_that_waited_for_memory_joins_within_two_steps() -> None:
    """A sequence that waits for memory joins at most two steps after the memory is free, while others still run."""
    client = EngineClient(Engine(Device(fused(6)), max_batch=4, step_tokens=64))
    plain(client, 0, 40)
    plain(client, 1, 12)
    client.submit(2, [*range(20, 69)], 4, logprobs=None)
    while client.completions[1].last is None or client.completions[1].last.finish_reason is None:
        client.step()
        assert client.completions[2].sequence.started_at is None
    client.step()
    client.step()
    assert client.completions[2].sequence.started_at is not None
    assert client.completions[0].sequence.num_generated < 20
    client.run()


def test_rows_that_go_on_keep_their_own_tokens() -> None:
    """The rows that go on keep their own tokens when a row before or between them ends."""
    client = EngineClient(Engine(Device(fused(20)), max_batch=8, step_tokens=64))
    lengths = [3, 20, 9, 15, 4]
    for number, length in enumerate(lengths):
        plain(client, number, length)
    client.run()
    for number, length in enumerate(lengths):
        assert client.completions[number].text == alone(fused(20), [20 + number], length, ignore_eos=True).text


def test_a_prompt_that_got_no_budget_is_not_passed_over() -> None:
    """No step is launched ahead past a prompt that still waits for its part of the budget."""
    client = EngineClient(Engine(Device(fused(20)), max_batch=2, step_tokens=2))
    client.submit(0, [20, 21], 30, logprobs=None, ignore_eos=True)
    client.submit(1, [*range(30, 60)], 4, logprobs=None)
    client.step()
    assert (client.completions[0].sequence.num_generated, client.completions[1].sequence.num_computed) == (1, 0)
    client.step()
    client.step()
    assert client.completions[1].sequence.num_computed > 0
    client.run()


def test_a_step_ahead_preempts_no_sequence() -> None:
    """When blocks run out, the engine takes over the steps under way before it preempts a sequence."""
    client = EngineClient(Engine(Device(fused(4)), max_batch=2, step_tokens=64))
    for number in range(2):
        client.submit(number, [20 + number] * 14, 40, logprobs=None, ignore_eos=True)
    client.run()
    assert client.engine.stats().preemptions > 0
    for number in range(2):
        expected = alone(fused(4), [20 + number] * 14, 40, ignore_eos=True)
        assert client.completions[number].text == expected.text


class Even:
    """A constraint that allows even tokens only."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> torch.Tensor:
        return torch.arange(VOCABULARY) % 2 == 0

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)


def test_a_constrained_answer_launches_nothing_ahead() -> None:
    """A constrained answer follows its constraint, and no step is launched ahead of its tokens."""
    device = Device(fused(20))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    plain(client, 0, 12)
    plain(client, 1, 12)
    form = Even()
    client.completions[1].sequence.constraint = form
    client.run()
    assert len(form.accepted) == 12
    assert not any(token % 2 for token in form.accepted)
    assert not any(device.ahead)


def test_the_surplus_row_of_a_stop_string_is_thrown_away() -> None:
    """After a stop string one surplus row is computed, thrown away and not counted as a first-time row."""
    full = alone(fused(20), [20], 30, ignore_eos=True).text
    device = Device(fused(20))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    stop = full[21:25]
    plain(client, 0, stop=(stop,))
    plain(client, 1, 40)
    client.run()
    last = client.completions[0].last
    assert client.completions[0].text == full[: full.index(stop)]
    assert last is not None
    assert last.finish_reason is FinishReason.STOP
    stats = client.engine.stats()
    assert stats.computed_rows == stats.first_time_rows + 1
    assert client.completions[1].text == alone(fused(20), [21], 40, ignore_eos=True).text


def test_a_step_whose_sequences_have_all_left_is_forgotten() -> None:
    """A step whose sequences have all left is forgotten, and later sequences on their blocks are not affected."""
    device = Device(fused(4))
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    for leave in (lambda: client.engine.abort(0), client.engine.fail_all):
        plain(client, 0)
        for _ in range(3):
            client.step()
        leave()
        assert not client.engine.has_work
        assert client.engine.pool.num_free == 4
        client.completions.clear()
    client.submit(1, [*range(30, 70)], 12, logprobs=None)
    client.run()
    assert client.completions[1].text == alone(fused(4), [*range(30, 70)], 12).text


def test_a_deadline_ends_an_answer_under_way() -> None:
    """A deadline ends an answer with a row in the step under way, and the other rows keep their tokens."""
    client = EngineClient(Engine(Device(fused(20)), max_batch=4, step_tokens=64))
    plain(client, 0)
    plain(client, 1)
    for _ in range(3):
        client.step()
    client.completions[0].sequence.deadline = time.monotonic()
    client.run()
    last = client.completions[0].last
    assert last is not None
    assert last.finish_reason is FinishReason.EXPIRED
    assert client.completions[1].text == alone(fused(20), [21], 30, ignore_eos=True).text


def test_nan_logits_of_a_step_ahead_fail_one_sequence() -> None:
    """NaN logits in a step that was launched ahead fail one sequence, though the next step is under way."""
    client = EngineClient(Engine(Device(fused(20)), max_batch=4, step_tokens=64))
    plain(client, 0)
    plain(client, 1)
    client.step()
    client.step()
    bad = client.completions[0].sequence
    bad_from = bad.num_generated
    client.engine.runner = Poisoning(client.engine.runner)
    client.run()
    last = client.completions[0].last
    assert last is not None
    assert last.finish_reason is FinishReason.FAILED
    assert bad.num_generated == bad_from + 1, "the token of the step that was under way, and no other"
    assert client.engine.stats().non_finite == 1
    assert client.completions[1].text == alone(fused(20), [21], 30, ignore_eos=True).text


class Poisoning(Around):
    """Replaces the first row's token by one whose embedding is NaN, once."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._done = False

    def run(self, step: StepInput) -> StepOutput:
        if not self._done and step.device_tokens is not None:
            self._done = True
            tokens = step.device_tokens.clone()
            tokens[0] = POISON
            step = dataclasses.replace(step, device_tokens=tokens)
        return self._runner.run(step)


@pytest.mark.parametrize("fails_at", [1, 2, 7])
def test_out_of_memory_ahead_ends_the_younger_half(fails_at: int) -> None:
    """A step ahead without memory sheds the younger half after the tokens before it are delivered."""
    device = Device(fused(20))
    device.fails_at = fails_at
    client = EngineClient(Engine(device, max_batch=4, step_tokens=64))
    for number in range(4):
        plain(client, number, temperature=0.9)
    client.run()
    reasons = [completion.last and completion.last.finish_reason for completion in client.completions.values()]
    assert reasons == [FinishReason.LENGTH] * 2 + [FinishReason.SHED] * 2
    assert [client.completions[n].sequence.num_generated for n in (2, 3)] == [fails_at - 1] * 2
    for number in range(2):
        expected = alone(fused(20), [20 + number], 30, number=number, ignore_eos=True, temperature=0.9)
        assert client.completions[number].text == expected.text


def test_a_step_ahead_keeps_the_blocks_that_its_windows_see() -> None:
    """Blocks outside the window are given back while a step is under way, except those that it still reads."""
    config = dataclasses.replace(CONFIG, windows=(24, 24))
    client = EngineClient(Engine(Device(TorchRunner(config, weights(), 14, CONTEXT)), max_batch=3, step_tokens=32))
    for number in range(3):
        plain(client, number, 100)
    client.run()
    assert client.engine.stats().preemptions == 0, "whole contexts would not have fitted"
    for number in range(3):
        expected = alone(TorchRunner(config, weights(), 14, CONTEXT), [20 + number], 100, ignore_eos=True)
        assert client.completions[number].text == expected.text


async def test_random_requests_with_random_ends_and_steps_ahead() -> None:
    """The soak test passes with a runner that launches ahead: blocks are free and equal requests get equal answers."""
    devices: list[Device] = []

    def make(num_blocks: int, precision: str, kv_precision: KVPrecision) -> Device:
        devices.append(Device(fused(num_blocks, precision, kv_precision)))
        return devices[0]

    tally = await soak(5.0, seed=3, make=make)
    assert tally.engine is not None
    assert tally.engine.stats().preemptions > 0
    assert sum(devices[0].ahead) > len(devices[0].ahead) // 10
