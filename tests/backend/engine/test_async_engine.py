"""The engine's thread sleeps without work, wakes in time, and runs its integrity check while it is idle."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from backend.api import metrics as metrics_module
from backend.api.metrics import Metrics
from backend.engine import async_engine
from backend.engine.async_engine import AsyncEngine, CompletionRate, Generation, StepReport
from backend.engine.config import Batching, BatchingMode
from backend.engine.engine import Engine
from backend.engine.model_runner import ModelRunner, StepInput, StepOutput
from backend.engine.output_processor import Output
from backend.engine.sequence import FinishReason, SamplingParams, Sequence
from backend.engine.stats import StepTimings
from backend.errors import QueueFull
from backend.text.detokenizer import Detokenizer
from tests.backend.engine.test_engine_faults import Around
from tests.backend.tiny_model import fused, token_bytes

numbers = itertools.count()


def sequence(prompt: list[int], answer: int = 8, **options: Any) -> Sequence:
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    return Sequence(next(numbers), prompt, params, Detokenizer(token_bytes()), 0, **options)


@asynccontextmanager
async def running(
    engine: Engine, on_step: Callable[[StepReport], None] = lambda _: None, max_in_flight: int = 8
) -> AsyncIterator[AsyncEngine]:
    served = AsyncEngine(engine, max_in_flight, on_step)
    served.start()
    try:
        async with asyncio.timeout(30):
            yield served
    finally:
        await served.stop()


async def answers(served: AsyncEngine, *sequences: Sequence) -> list[Output]:
    """The last output of each sequence of one request."""
    generation = served.submit(sequences)
    last: dict[int, Output] = {}
    try:
        while generation.unfinished:
            last.update(await generation.take())
    finally:
        served.release(sequences, generation)
    return [last[index] for index in range(len(sequences))]


def check_integrity_after(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the idle time before an integrity check; private, as operators have no reason to change it."""
    monkeypatch.setattr(async_engine, "_CHECK_AFTER_SECONDS", seconds)


async def test_a_dynamic_batch_begins_without_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread wakes when the first request has waited for `max_wait`, without another request or a check."""
    check_integrity_after(3600.0, monkeypatch)
    engine = Engine(fused(20), 4, 32, Batching(BatchingMode.DYNAMIC, max_wait=0.05))
    async with running(engine) as served:
        started = time.monotonic()
        (output,) = await answers(served, sequence([20]))
        assert time.monotonic() - started >= 0.05
        assert output.finish_reason is FinishReason.LENGTH
        await answers(served, sequence([21]))
        await asyncio.gather(*(answers(served, sequence([20 + n])) for n in range(4)))


async def test_a_deadline_wakes_the_thread() -> None:
    """The thread wakes at a waiting request's deadline, even if the batch would have waited for an hour."""
    engine = Engine(fused(20), 4, 32, Batching(BatchingMode.DYNAMIC, max_wait=3600.0))
    async with running(engine) as served:
        (output,) = await answers(served, sequence([20], deadline=time.monotonic() + 0.05))
    assert output.finish_reason is FinishReason.EXPIRED
    assert output.error == "the request's deadline passed while it waited"


async def test_an_idle_engine_checks_its_integrity_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An idle engine checks its integrity once after each busy period, counts the problems and repairs nothing."""
    check_integrity_after(0.01, monkeypatch)
    engine = Engine(fused(20), 4, 32)
    found: asyncio.Queue[int] = asyncio.Queue()
    checks = 0
    check = engine.problems

    def counted() -> list[str]:
        nonlocal checks
        checks += 1
        return check()

    monkeypatch.setattr(engine, "problems", counted)

    def note(report: StepReport) -> None:
        if checks and not report.computed and not report.stats.running:
            found.put_nowait(report.problems)

    async with running(engine, note) as served:
        await answers(served, sequence([20]))
        assert await found.get() == 0
        lost = engine.pool.allocate(1)
        assert lost is not None
        await answers(served, sequence([21]))
        while not await found.get():
            pass
        assert engine.pool.ref_count(lost[0]) == 1
        assert checks == 2
    message = f"integrity check: block {lost[0]} counts 1 references, sequences hold it 0 times"
    assert [record.message for record in caplog.records] == [message]


async def test_a_full_queue_gives_a_retry_after() -> None:
    """`QueueFull.retry_after` follows from how fast answers have ended so far."""
    engine = Engine(fused(20), 1, 32)
    async with running(engine, max_in_flight=2) as served:
        for _ in range(3):
            await answers(served, sequence([20]))
        one, two = sequence([20], 200), sequence([21], 200)
        generation = served.submit([one, two])
        with pytest.raises(QueueFull, match="2 of at most 2") as refused:
            served.submit([sequence([22])])
        assert refused.value.retry_after == 1, "these answers take milliseconds"
        served.release([one, two], generation)
        assert served.in_flight == 0
        await answers(served, sequence([20]))


async def test_each_output_is_taken_once() -> None:
    """`take` returns all outputs since the last call, each with its sequence's index in the request."""
    generation = Generation([7, 9])
    first, second = (Output(number, "a", [], [], 1, None) for number in (9, 7))
    last = Output(7, "b", [], [], 2, FinishReason.LENGTH)
    generation.put(first)
    generation.put(second)
    assert await generation.take() == [(1, first), (0, second)]
    generation.put(last)
    assert await generation.take() == [(0, last)]
    assert generation.unfinished == {9}


def test_the_completion_rate_is_the_mean_of_the_last_completions() -> None:
    """The completion rate is the mean of the last 64 completions, or the time since the first request before one."""
    rate = CompletionRate()
    rate.begin(100.0)
    assert rate.seconds_until(1, 100.0) == 1
    assert rate.seconds_until(1, 107.5) == 8
    assert rate.seconds_until(3, 107.5) == 23
    for number in range(200):
        rate.record(1, 110.0 + 2 * number)
    assert rate.seconds_until(1, 510.0) == 3, "no more than the last 64 count, 2 s apart"
    assert rate.seconds_until(5, 510.0) == 11
    assert rate.seconds_until(1000, 510.0) == 60, "at most a minute"
    rate.begin(2000.0)
    assert rate.seconds_until(1, 2000.0) == 1, "a new busy time"
    assert rate.seconds_until(1, 2010.0) == 10, "in which none has ended yet"
    rate.record(4, 2010.0)
    assert rate.seconds_until(1, 2012.0) == 3, "the four answers of one request, in 12 s"


async def test_metrics_report_what_the_engine_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics report the engine's counts, times and ratios under stable names."""
    engine = Engine(fused(40), 4, 64)
    metrics = Metrics(engine.stats())
    async with running(engine, metrics.record_step) as served:
        prompt = [*range(20, 60)]
        await answers(served, *(sequence(prompt, 10) for _ in range(2)))
        await answers(served, sequence(prompt, 1), sequence([30], 4, deadline=time.monotonic() - 1))
    lines = (line.rsplit(" ", 1) for line in metrics.exposition().decode().splitlines() if not line.startswith("#"))
    value = {name.removeprefix("keepgate_backend_"): float(number) for name, number in lines}
    assert value["generated_tokens_total"] == 21
    assert value["prefix_cache_hits_total"] == 2 * 32
    assert value["prefix_cache_queries_total"] == 3 * 40
    assert value["prompt_tokens_total"] == 40 + 8 + 8
    assert value["deadline_exceeded_total"] == 1
    assert value["queue_time_seconds_count"] == 3
    assert 0 <= value["queue_time_seconds_sum"] < 30
    assert value["inter_token_latency_seconds_count"] == 18
    assert value["answer_tokens_per_second_count"] == 2
    assert value["tokens_per_second"] == pytest.approx(2.1)
    assert value["padding_efficiency_ratio"] == value["first_time_rows_ratio"] == 1.0
    assert value["padding_rows_total"] == 0
    assert value["batch_utilisation_ratio"] == pytest.approx(
        value["batch_slots_used_total"] / (4 * value["step_seconds_count"])
    )
    assert value["kv_blocks_free"] == value["kv_blocks"] == 40
    assert value["kv_blocks_cached"] == 3, "two of the prompt, and one with the first tokens of an answer"
    assert value["kv_blocks_held"] == value["kv_fragmentation_ratio"] == 0
    assert value["step_seconds_count"] == engine.stats().steps, "not the times when requests only came or went"
    # The window of the rate is no option; the test would have to wait for its ten seconds.
    monkeypatch.setattr(metrics_module, "_RATE_SECONDS", 1e-9)
    assert "keepgate_backend_tokens_per_second 0.0\n" in metrics.exposition().decode(), "all that was long ago"


def test_every_fault_is_counted() -> None:
    """A failed step counts as one fault, and each problem of an integrity check counts."""
    stats = Engine(fused(4), 1, 32).stats()
    metrics = Metrics(stats)
    metrics.record_step(StepReport(stats, StepTimings(), computed=False, seconds=0.0, failed=False, problems=3))
    metrics.record_step(StepReport(stats, StepTimings(), computed=False, seconds=0.0, failed=True))
    text = metrics.exposition().decode()
    assert "\nkeepgate_backend_integrity_problems_total 3.0\n" in text
    assert "\nkeepgate_backend_failed_steps_total 1.0\n" in text


class Held(Around):
    """A runner whose first step lasts until `let_go` is set."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.has_started, self.let_go = threading.Event(), threading.Event()
        self.rows: list[int] = []

    def run(self, step: StepInput) -> StepOutput:
        self.rows.append(len(step.query_starts) - 1)
        self.has_started.set()
        assert self.let_go.wait(30)
        return self._runner.run(step)


async def test_requests_that_arrive_during_a_step_join_the_next_one() -> None:
    """The next step has all requests that arrived during a step, except those that were released meanwhile."""
    runner = Held(fused(20))
    async with running(Engine(runner, 8, 64)) as served:
        first = asyncio.create_task(answers(served, sequence([20])))
        await asyncio.to_thread(runner.has_started.wait)
        others = [asyncio.create_task(answers(served, sequence([21 + number]))) for number in range(3)]
        left = sequence([30])
        generation = served.submit([left])
        served.release([left], generation)
        await asyncio.sleep(0)
        runner.let_go.set()
        await asyncio.gather(first, *others)
    assert runner.rows[:2] == [1, 4]


def test_an_event_loop_that_has_ended_gets_no_outputs(caplog: pytest.LogCaptureFixture) -> None:
    """The thread logs nothing, and can be stopped, when its event loop ends before a step's outputs arrive."""
    runner = Held(fused(20))
    served = AsyncEngine(Engine(runner, 4, 32), 8, lambda _: None)

    async def leave() -> None:
        served.start()
        served.submit([sequence([20])])
        await asyncio.to_thread(runner.has_started.wait)

    asyncio.run(leave())
    runner.let_go.set()
    asyncio.run(served.stop())
    assert caplog.messages == []
    assert served.engine.has_work is False


async def test_a_lost_step_does_not_keep_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose runner is lost stops after some seconds, and its requests fail, although a step never ends."""
    monkeypatch.setattr(async_engine, "_BROKEN_STOP_SECONDS", 0.05)
    runner = Held(fused(20))
    served = AsyncEngine(Engine(runner, 4, 32), 8, lambda _: None)
    served.start()
    request = asyncio.create_task(answers(served, sequence([20])))
    await asyncio.to_thread(runner.has_started.wait)
    served.mark_lost("rank 1 was killed")
    async with asyncio.timeout(10):
        await served.stop()
        (output,) = await request
    assert output.finish_reason is FinishReason.FAILED
    runner.let_go.set()


class Padded(Around):
    """A runner that pads each step to a multiple of eight rows."""

    def run(self, step: StepInput) -> StepOutput:
        return dataclasses.replace(self._runner.run(step), padding_rows=-len(step.token_ids) % 8)


async def test_padding_rows_lower_the_efficiency_and_are_no_tokens() -> None:
    """Padding rows lower the padding efficiency, and rows computed again after a preemption the first-time share."""
    engine = Engine(Padded(fused(4)), 2, 64)
    metrics = Metrics(engine.stats())
    async with running(engine, metrics.record_step) as served:
        await answers(served, sequence([*range(20, 36)], 30), sequence([*range(40, 56)], 30))
    stats = engine.stats()
    assert stats.preemptions == 1
    shares = {}
    for line in metrics.exposition().decode().splitlines():
        if "_ratio " in line and not line.startswith("#"):
            name, number = line.removeprefix("keepgate_backend_").split(" ")
            shares[name] = float(number)
    assert (stats.computed_rows + stats.padding_rows) % 8 == 0
    assert shares["padding_efficiency_ratio"] == stats.computed_rows / (stats.computed_rows + stats.padding_rows) < 0.5
    assert shares["first_time_rows_ratio"] == stats.first_time_rows / stats.computed_rows < 1


async def test_a_sequence_that_cannot_fit_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A sequence that cannot fit the KV memory fails its whole request at once, and all other requests go on."""
    engine = Engine(fused(20), 4, 64)
    async with running(engine) as served:
        going_on = asyncio.create_task(answers(served, sequence([*range(20, 60)], 200)))
        refused = await answers(served, sequence([2], 3), sequence([1], 100_000), sequence([2], 3))
        assert {output.finish_reason for output in refused} == {FinishReason.FAILED}
        (output,) = await going_on
        assert output.finish_reason is FinishReason.LENGTH
        await answers(served, sequence([2], 3))
    assert engine.pool.num_free == 20
    assert engine.problems() == []
    (record,) = caplog.records
    assert record.message == "a request is refused that should not have been submitted"


async def test_aborted_answers_do_not_count_in_the_answer_speed() -> None:
    """The histogram of answer speeds counts completed answers and no aborted ones."""
    engine = Engine(fused(40), 4, 64)
    metrics = Metrics(engine.stats())
    async with running(engine, metrics.record_step) as served:
        for _ in range(5):
            left = sequence([20], 400)
            generation = served.submit([left])
            while left.num_generated < 3:
                await generation.take()
            served.release([left], generation)
            await answers(served, sequence([30], 4))
    text = metrics.exposition().decode()
    assert "keepgate_backend_answer_tokens_per_second_count 5.0" in text


async def test_the_completion_rate_begins_anew_after_an_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The completion rate begins anew with the first request after an idle time, and not with each request."""
    begun: list[float] = []
    monkeypatch.setattr(CompletionRate, "begin", lambda self, now: begun.append(now))
    async with running(Engine(fused(40), 4, 64)) as served:
        first, second = sequence([20], 200), sequence([21], 200)
        generations = [served.submit([first]), served.submit([second])]
        assert len(begun) == 1
        served.release([first], generations[0])
        await answers(served, sequence([22]))
        assert len(begun) == 1
        served.release([second], generations[1])
        await answers(served, sequence([23]))
        assert len(begun) == 2
