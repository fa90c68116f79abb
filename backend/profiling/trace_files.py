"""Files for ui.perfetto.dev and chrome://tracing: the timeline of a run, and torch's profiler on a few steps.

Both are in Chrome's trace event format, JSON. The operators are those of a run of their own, in one thread, for
torch's profiler slows down what it observes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.model_runner import StepInput, StepOutput
from backend.model import ServedModel
from backend.profiling.instrumentation import TIMED, WAITING, Recorder, Span, replaced, runner_class
from backend.profiling.machine import Machine
from backend.profiling.memory import is_on_cuda
from backend.profiling.replay import RequestRecord
from backend.profiling.work import ModelWork
from backend.profiling.workload import WorkItem, read_item
from backend.requests.reader import RequestReader

_ENGINE, _LOOP, _STORE = 1, 2, 3
_THREADS = {_ENGINE: "engine", _LOOP: "event loop", _STORE: "prefix store"}
_MICROSECONDS = 1e6
_SEQUENCES, _STEPS = 2, 24
"""Of the run that torch's profiler observes."""
_MOST_OPERATORS = 12
_MOST_SPANS = 500_000
"""Of a thread, from the first on: a browser takes files of some hundred MB."""


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """An operator of torch, or a part of a step, with the time that it took itself; in seconds."""

    name: str
    count: int
    seconds: float
    """Of the processor."""
    device_seconds: float
    """Of a CUDA device."""


def write_timeline(
    file: Path, records: Sequence[RequestRecord], recorder: Recorder, work: ModelWork, machine: Machine
) -> None:
    """Writes every step, its parts, and the phases of every request. Raises OSError."""
    start = min(record.arrived for record in records)
    events = [
        *(_named("thread_name", thread, {"name": name}) for thread, name in _THREADS.items()),
        _named("process_name", 0, {"name": "keepgate profile"}),
        *(_complete(span, _ENGINE, start, {}) for span in recorder.engine[:_MOST_SPANS] if span.name != WAITING),
        *(
            _complete(span, _STORE if span.name == "prefix store" else _LOOP, start, {})
            for span in recorder.loop[:_MOST_SPANS]
        ),
        *_steps(recorder, start, work, machine),
        *(event for number, record in enumerate(records) for event in _request(number, record, start)),
    ]
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def write_operators(
    file: Path, model: ServedModel, engine: EngineConfig, items: Sequence[WorkItem]
) -> list[OperatorTime]:
    """Runs a few steps of the first requests under torch's profiler, and writes its trace.

    Returns:
        What took most time, in falling order.

    Raises:
        OSError: the file cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if is_on_cuda(model.runner):
        activities.append(ProfilerActivity.CUDA)
    with ExitStack() as stack:
        for owner, name, part in TIMED:
            stack.enter_context(replaced(owner, name, partial(_labelled, part)))
        stack.enter_context(replaced(runner_class(model.runner), "run", _labelled_step))
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
            _run_steps(model, engine, items)
    profiler.export_chrome_trace(str(file))
    found = [
        OperatorTime(
            event.key,
            event.count,
            event.self_cpu_time_total / _MICROSECONDS,
            event.self_device_time_total / _MICROSECONDS,
        )
        for event in profiler.key_averages()
    ]
    return sorted(found, key=lambda one: -max(one.seconds, one.device_seconds))[:_MOST_OPERATORS]


def _run_steps(model: ServedModel, config: EngineConfig, items: Sequence[WorkItem]) -> None:
    """Computes the first requests in this thread, until they end or there are enough steps."""
    reader = RequestReader(model, len(items), True, config.drop_images)
    try:
        engine = Engine(model.runner, config.max_batch, config.step_tokens, shares_prefixes=False)
        for item in items[:_SEQUENCES]:
            for sequence in read_item(item, reader, model.name).sequences:
                engine.add(sequence)
        for _ in range(_STEPS):
            if engine.has_work:
                engine.step()
        engine.fail_all()
    finally:
        reader.close()


def _labelled(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def labelled(*arguments: Any) -> Any:
        with record_function(part):
            return function(*arguments)

    return labelled


def _labelled_step(run: Callable[..., StepOutput]) -> Callable[..., StepOutput]:
    def labelled(runner: object, step: StepInput) -> StepOutput:
        rows, sequences = len(step.token_ids), len(step.query_starts) - 1
        with record_function("decode step" if rows == sequences else "prefill step"):
            return run(runner, step)

    return labelled


def _named(kind: str, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": thread, "name": kind, "args": arguments}


def _complete(span: Span, thread: int, start: float, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": thread,
        "name": span.name,
        "ts": (span.start - start) * _MICROSECONDS,
        "dur": span.seconds * _MICROSECONDS,
        "args": arguments,
    }


def _steps(recorder: Recorder, start: float, work: ModelWork, machine: Machine) -> Iterator[dict[str, Any]]:
    """What each step computed, as an instant with figures, and the batch as a curve."""
    for step in recorder.steps:
        at, its = (step.start - start) * _MICROSECONDS, work.of(step)
        figures = {
            "sequences": step.sequences,
            "tokens": step.rows,
            "tokens of prompts": step.prefill_rows,
            "model ms": 1000 * step.model_seconds,
            "bytes moved": its.bytes,
            "GFLOP": its.flops / 1e9,
            "bytes at the measured bandwidth, ms": 1000 * its.bytes / machine.bytes_per_second,
            "operations at the measured peak, ms": 1000 * its.flops / machine.flops_per_second,
        }
        name = f"{step.kind} step"
        yield {"ph": "i", "s": "t", "pid": 1, "tid": _ENGINE, "name": name, "ts": at, "args": figures}
        yield {"ph": "C", "pid": 1, "name": "batch", "ts": at, "args": {"sequences": step.sequences}}
        yield {"ph": "C", "pid": 1, "name": "tokens", "ts": at, "args": {"tokens": step.rows}}


def phases_in_order(record: RequestRecord) -> list[Span]:
    """The phases of one request, from its arrival to its end."""
    last = record.token_times[-1] if record.token_times else record.ended
    times = (record.arrived, record.tokenised, record.queued, record.started, record.first_token, last, record.ended)
    names = ("tokenise", "prefix store", "queue", "prefill", "decode", "finish")
    return [Span(name, *between) for name, between in zip(names, pairwise(times), strict=True)]


def _request(number: int, record: RequestRecord, start: float) -> Iterator[dict[str, Any]]:
    """A track of its own, with a slice for each phase."""
    arguments = {
        "tokens of the prompt": record.prompt_tokens,
        "cached": record.cached_tokens,
        "generated": sum(record.generated),
    }
    whole = Span(record.name, record.arrived, record.ended)
    for span in (whole, *phases_in_order(record)):
        for kind, at in (("b", span.start), ("e", span.end)):
            yield {
                "ph": kind,
                "cat": "request",
                "id": number,
                "pid": 1,
                "tid": 0,
                "name": span.name,
                "ts": (at - start) * _MICROSECONDS,
                "args": arguments if kind == "b" else {},
            }
