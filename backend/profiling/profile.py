"""Profiles a model on a workload: loads it, runs the requests, and says where time and memory went."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import EngineConfig
from backend.engine.stats import EngineStats
from backend.errors import ModelError
from backend.model import ServedModel, load_model
from backend.model_loader.source import resolve_model
from backend.profiling.attribution import Part, Phases, parts_of, phases_of, python_seconds, window_of
from backend.profiling.bottleneck import Roof, named, roofs_of
from backend.profiling.changes import Change
from backend.profiling.instrumentation import KINDS, Kind, Recorder, StepRecord, instrumented
from backend.profiling.machine import Machine, ProcessorUse, measure
from backend.profiling.memory import Memory, MemoryWatch, is_on_cuda, read_bytes
from backend.profiling.replay import RequestRecord, forget, opened, replay
from backend.profiling.trace_files import OperatorTime, write_operators
from backend.profiling.trials import Bench, Trials, run_trials
from backend.profiling.work import ModelWork
from backend.profiling.workload import WorkItem, addressed, check, made_up, requests_of
from backend.runners.warm_up import warm_up

_DISTURBING = 0.25
"""Processors that other programs use."""


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """What to profile, and how."""

    model: str
    engine: EngineConfig
    chat_template: str | None = None
    requests: Path | None = None
    """JSONL file of requests; None: a small workload that is made up."""
    concurrency: int = 4
    """Requests at a time."""
    price_per_hour: float | None = None
    """Of the machine, in dollars."""
    changes: tuple[Change, ...] = ()
    """What is tried beside the settings as they are."""
    rounds: int = 3
    """How often each of them is run."""
    output: Path | None = None
    """An existing folder for files; None: none are written."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of durations, in seconds."""

    p50: float
    p90: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Steps of one kind and, of decode steps, one batch; times in seconds, Python included."""

    kind: Kind
    batch: int | None
    """Sequences in each; None: any number."""
    count: int
    total: float
    duration: Quantiles
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Shares from 0 to 1."""

    busy: float
    """Of the wall time in which the engine's thread computed."""
    python: float
    """Of the time it was busy, in Python between the runner's calls."""
    batch_fill: float
    """Sequences in a step, of the most that may run."""
    token_fill: float
    """Tokens in a step that has tokens of prompts, of the most that a step computes."""
    padding: float
    """Of computed rows, those that filled up a shape."""
    preemptions: int
    processors: float
    """Used by this process, on average."""
    others: float
    """Used by all other programs of the host: they slow the run down."""
    processors_there: int


@dataclass(frozen=True, slots=True)
class Cost:
    """In dollars, at the price of the machine and the speed of the run."""

    price_per_hour: float
    per_1k_generated: float
    """For 1,000 generated tokens: the whole time is theirs."""
    per_1k_tokens: float
    """For 1,000 tokens of prompts and answers together."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What was sent."""

    source: str
    requests: int
    concurrency: int
    prompt_tokens: int
    cached_tokens: int
    """Tokens of prompts whose keys and values were there already."""
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Profile:
    """Figures of one run; times in seconds, sizes in bytes."""

    model: str
    runner: str
    weights_precision: str
    workload: Workload
    wall_seconds: float
    generated_per_second: float
    prompt_tokens_per_second: float
    bottleneck: str
    parts: list[Part]
    phases: Phases
    ttft: Quantiles
    itl: Quantiles | None
    """None: no answer has a second token."""
    steps: list[StepFigures]
    utilisation: Utilisation
    memory: Memory
    machine: Machine
    roofs: list[Roof]
    cost: Cost | None
    trials: Trials | None
    """None: nothing was tried."""
    operators: list[OperatorTime]
    """Of a few steps under torch's profiler, where files are written."""


@dataclass(frozen=True, slots=True)
class Run:
    """A profile, and what it was made of."""

    profile: Profile
    records: list[RequestRecord]
    recorder: Recorder
    work: ModelWork


def profile_model(config: ProfileConfig, progress: Progress) -> Run:
    """Loads a model, profiles it, tries changes, and writes files, where that is asked for.

    Raises:
        ModelError: the model, the file of requests or a request is wrong; the message names it.
    """
    requests = None if config.requests is None else requests_of(config.requests)
    config = dataclasses.replace(config, engine=_without_index(config.engine, progress))
    source = dataclasses.replace(resolve_model(config.model, progress), chat_template=config.chat_template)
    model = load_model(source, config.engine, progress)
    items = made_up(model) if requests is None else addressed(requests, model.name)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(_profile(model, items, config, progress))
        if config.changes:
            work = run.profile.workload
            bench = Bench(
                source,
                model,
                config.engine,
                items,
                work.concurrency,
                {record.name: record.generated for record in run.records},
                work.prompt_tokens + work.generated_tokens,
            )
            trials = runner.run(run_trials(bench, config.changes, config.rounds, progress))
            run = dataclasses.replace(run, profile=dataclasses.replace(run.profile, trials=trials))
        return _with_operators(run, model, config, items, progress)


def _without_index(engine: EngineConfig, progress: Progress) -> EngineConfig:
    """The engine, which shares no blocks with other engines: they cannot reach it."""
    if engine.prefix_store is None or not engine.prefix_store.index:
        return engine
    progress("the index of the prefix store is not used")
    return dataclasses.replace(engine, prefix_store=dataclasses.replace(engine.prefix_store, index=""))


def _with_operators(
    run: Run, model: ServedModel, config: ProfileConfig, items: Sequence[WorkItem], progress: Progress
) -> Run:
    """Observes a few steps with torch's profiler, where files are asked for."""
    if config.output is None:
        return run
    progress("observing a few steps with torch's profiler")
    operators = write_operators(config.output / "operators.json", model, config.engine, items)
    return dataclasses.replace(run, profile=dataclasses.replace(run.profile, operators=operators))


async def _profile(model: ServedModel, items: list[WorkItem], config: ProfileConfig, progress: Progress) -> Run:
    device = "cuda" if is_on_cuda(model.runner) else "cpu"
    step_bytes = read_bytes(model)
    watch = MemoryWatch(model.runner)
    async with opened(model, config.engine) as state:
        _check_concurrency(config, model, check(items, state.reader, model.name, state.strict_fields))
        progress("warming up")
        warm_up(model.runner, model.tokenizer.token_bytes, model.max_context)
        before, use = state.engine.engine.stats(), ProcessorUse()
        progress(f"running {len(items)} requests, {min(config.concurrency, len(items))} at a time")
        with instrumented(model.runner) as recorder:
            records = await replay(state, items, config.concurrency, recorder)
        own, others = use.until_now()
        after = state.engine.engine.stats()
        memory = watch.memory(recorder.most_held)
        await forget(state)
    progress("measuring memory bandwidth and products")
    machine = measure(step_bytes, model.runner.weights_precision, device)
    machine = machine.better(measure(step_bytes, model.runner.weights_precision, device))
    work = ModelWork(model.config, step_bytes, model.runner.kv_bytes_per_token)
    profile = _figures(model, config, records, recorder, (before, after), (own, others), memory, machine, work)
    return Run(profile, records, recorder, work)


def _check_concurrency(config: ProfileConfig, model: ServedModel, sequences: int) -> None:
    """Raises ModelError if the engine would refuse requests of so many sequences, sent so many at a time."""
    most = (config.engine.max_batch or model.runner.max_batch) + config.engine.max_waiting
    if config.concurrency * sequences > most:
        raise ModelError(
            f"--concurrency: {config.concurrency} requests with up to {sequences} answers each are more than the "
            f"{most} that may run and wait; expected at most {most // sequences}, or a larger --max-waiting"
        )


def _figures(
    model: ServedModel,
    config: ProfileConfig,
    records: list[RequestRecord],
    recorder: Recorder,
    stats: tuple[EngineStats, EngineStats],
    processors: tuple[float, float],
    memory: Memory,
    machine: Machine,
    work: ModelWork,
) -> Profile:
    window = window_of(records)
    wall = window[1] - window[0]
    parts = parts_of(recorder, window)
    roofs = roofs_of(recorder.steps, work, machine)
    generated = sum(sum(record.generated) for record in records)
    prompts = sum(record.prompt_tokens for record in records)
    gaps = [gap for record in records for gap in record.gaps]
    return Profile(
        model=model.name,
        runner=model.runner.name,
        weights_precision=model.runner.weights_precision,
        workload=Workload(
            "made up" if config.requests is None else str(config.requests),
            len(records),
            min(config.concurrency, len(records)),
            prompts,
            sum(record.cached_tokens for record in records),
            generated,
        ),
        wall_seconds=wall,
        generated_per_second=generated / wall,
        prompt_tokens_per_second=prompts / wall,
        bottleneck=named(parts, roofs) + _disturbed(processors[1]),
        parts=parts,
        phases=phases_of(records),
        ttft=quantiles([record.ttft for record in records]),
        itl=quantiles(gaps) if gaps else None,
        steps=_step_figures(recorder.steps),
        utilisation=_utilisation(parts, recorder.steps, stats, processors),
        memory=memory,
        machine=machine,
        roofs=roofs,
        cost=cost_of(config.price_per_hour, wall, generated, prompts),
        trials=None,
        operators=[],
    )


def _disturbed(others: float) -> str:
    """A remark where other programs used so many processors that it matters."""
    if others < _DISTURBING:
        return ""
    return f". Other programs used {others:.1f} of {os.cpu_count()} processors meanwhile: measure again without them"


def quantiles(durations: Sequence[float]) -> Quantiles:
    """Of at least one duration."""
    ordered = sorted(durations)
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99))
    return Quantiles(p50, p90, p99, ordered[-1])


def cost_of(price_per_hour: float | None, seconds: float, generated: int, prompts: int) -> Cost | None:
    """What a thousand tokens cost on a machine that does nothing else; None: its price is not known."""
    if price_per_hour is None:
        return None
    paid = 1000 * price_per_hour / 3600 * seconds
    return Cost(price_per_hour, paid / max(1, generated), paid / max(1, generated + prompts))


def _step_figures(steps: Sequence[StepRecord]) -> list[StepFigures]:
    figures = []
    for kind in KINDS:
        some = [step for step in steps if step.kind == kind and step.step_seconds]
        if some:
            figures.append(_figure(kind, None, some))
        batches = sorted({step.sequences for step in some}) if kind == "decode" else []
        figures += [_figure(kind, batch, [step for step in some if step.sequences == batch]) for batch in batches]
    return figures


def _figure(kind: Kind, batch: int | None, steps: Sequence[StepRecord]) -> StepFigures:
    total = sum(step.step_seconds for step in steps)
    tokens = sum(step.rows for step in steps)
    return StepFigures(kind, batch, len(steps), total, quantiles([step.step_seconds for step in steps]), tokens / total)


def _utilisation(
    parts: Sequence[Part],
    steps: Sequence[StepRecord],
    stats: tuple[EngineStats, EngineStats],
    processors: tuple[float, float],
) -> Utilisation:
    wall = sum(part.seconds for part in parts)
    waited = sum(
        part.seconds for part in parts if part.name in ("tokenise", "respond", "deliver", "prefix store", "idle")
    )
    busy = wall - waited
    before, after = stats
    count = max(1, after.steps - before.steps)
    prefills = [step for step in steps if step.prefill_rows]
    computed, padding = after.computed_rows - before.computed_rows, after.padding_rows - before.padding_rows
    return Utilisation(
        busy=busy / wall,
        python=python_seconds(parts) / busy,
        batch_fill=(after.batch_slots_used - before.batch_slots_used) / (count * after.max_batch),
        token_fill=statistics.fmean(step.rows for step in prefills) / after.step_tokens if prefills else 0.0,
        padding=padding / max(1, computed + padding),
        preemptions=after.preemptions - before.preemptions,
        processors=processors[0],
        others=processors[1],
        processors_there=os.cpu_count() or 1,
    )
