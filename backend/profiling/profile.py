"""Profiles a model on a workload: loads it, runs the requests, and says where time and memory went."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from backend.checkpoints.gguf.convert import Progress
from backend.engine.config import EngineConfig
from backend.errors import ModelError
from backend.model import ServedModel, load_model
from backend.model_loader.source import resolve_model
from backend.profiling.changes import Change
from backend.profiling.figures import Observed, Profile, figures_of
from backend.profiling.instrumentation import instrumented
from backend.profiling.machine import ProcessorUse, measure
from backend.profiling.memory import MemoryWatch, is_on_cuda, read_bytes
from backend.profiling.replay import forget, opened, replay
from backend.profiling.trace_files import write_operators
from backend.profiling.trials import Bench, run_trials
from backend.profiling.work import ModelWork
from backend.profiling.workload import WorkItem, addressed, check, made_up, requests_of
from backend.runners.warm_up import warm_up


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
class Run:
    """A profile, and what it was made of."""

    profile: Profile
    observed: Observed


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
                {record.name: record.generated for record in run.observed.records},
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
        processors, after = use.until_now(), state.engine.engine.stats()
        memory = watch.memory(recorder.most_held)
        await forget(state)
    progress("measuring memory bandwidth and products")
    machine = measure(step_bytes, model.runner.weights_precision, device)
    machine = machine.better(measure(step_bytes, model.runner.weights_precision, device))
    work = ModelWork(model.config, step_bytes, model.runner.kv_bytes_per_token)
    observed = Observed(records, recorder, before, after, processors, memory, machine, work)
    source = "made up" if config.requests is None else str(config.requests)
    return Run(figures_of(model, source, config.concurrency, config.price_per_hour, observed), observed)


def _check_concurrency(config: ProfileConfig, model: ServedModel, sequences: int) -> None:
    """Raises ModelError if the engine would refuse requests of so many sequences, sent so many at a time."""
    most = (config.engine.max_batch or model.runner.max_batch) + config.engine.max_waiting
    if config.concurrency * sequences > most:
        raise ModelError(
            f"--concurrency: {config.concurrency} requests with up to {sequences} answers each are more than the "
            f"{most} that may run and wait; expected at most {most // sequences}, or a larger --max-waiting"
        )
