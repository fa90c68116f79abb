"""The figures of a profile, and how they are made of what was recorded."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from backend.engine.stats import EngineStats
from backend.model import ServedModel
from backend.profiling.attribution import WAITED_FOR, Part, Phases, parts_of, phases_of, python_seconds, window_of
from backend.profiling.bottleneck import Roof, named, roofs_of
from backend.profiling.instrumentation import KINDS, Kind, Recorder, StepRecord
from backend.profiling.machine import Machine
from backend.profiling.memory import Memory
from backend.profiling.replay import RequestRecord
from backend.profiling.trace_files import OperatorTime
from backend.profiling.trials import Trials
from backend.profiling.work import ModelWork

_DISTURBING = 0.25
"""Processors that other programs use."""


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
    remark: str
    """What makes the figures less reliable; empty: nothing is known to."""
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
class Observed:
    """What was recorded of a run."""

    records: list[RequestRecord]
    recorder: Recorder
    before: EngineStats
    after: EngineStats
    processors: tuple[float, float]
    """Used by this process, and by others."""
    memory: Memory
    machine: Machine
    work: ModelWork


def figures_of(
    model: ServedModel, source: str, concurrency: int, price_per_hour: float | None, observed: Observed
) -> Profile:
    """All figures of a run but those of trials and operators.

    Args:
        source: where the requests are from.
        price_per_hour: of the machine, in dollars; None: not known.
    """
    records, recorder = observed.records, observed.recorder
    window = window_of(records)
    wall = window[1] - window[0]
    parts = parts_of(recorder, window)
    roofs = roofs_of(recorder.steps, observed.work, observed.machine)
    generated = sum(sum(record.generated) for record in records)
    prompts = sum(record.prompt_tokens for record in records)
    gaps = [gap for record in records for gap in record.gaps]
    return Profile(
        model=model.name,
        runner=model.runner.name,
        weights_precision=model.runner.weights_precision,
        workload=Workload(
            source,
            len(records),
            min(concurrency, len(records)),
            prompts,
            sum(record.cached_tokens for record in records),
            generated,
        ),
        wall_seconds=wall,
        generated_per_second=generated / wall,
        prompt_tokens_per_second=prompts / wall,
        bottleneck=named(parts, roofs),
        remark=_disturbed(observed.processors[1]),
        parts=parts,
        phases=phases_of(records),
        ttft=quantiles([record.ttft for record in records]),
        itl=quantiles(gaps) if gaps else None,
        steps=_step_figures(recorder.steps),
        utilisation=_utilisation(parts, observed),
        memory=observed.memory,
        machine=observed.machine,
        roofs=roofs,
        cost=cost_of(price_per_hour, wall, generated, prompts),
        trials=None,
        operators=[],
    )


def _disturbed(others: float) -> str:
    """A remark where other programs used so many processors that it matters."""
    if others < _DISTURBING:
        return ""
    return f"other programs used {others:.1f} of {os.cpu_count()} processors meanwhile: measure again without them"


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


def _utilisation(parts: Sequence[Part], observed: Observed) -> Utilisation:
    before, after, (own, others) = observed.before, observed.after, observed.processors
    wall = sum(part.seconds for part in parts)
    waited = sum(part.seconds for part in parts if part.name in WAITED_FOR)
    busy = wall - waited
    count = max(1, after.steps - before.steps)
    prefills = [step for step in observed.recorder.steps if step.prefill_rows]
    computed, padding = after.computed_rows - before.computed_rows, after.padding_rows - before.padding_rows
    return Utilisation(
        busy=busy / wall,
        python=python_seconds(parts) / busy,
        batch_fill=(after.batch_slots_used - before.batch_slots_used) / (count * after.max_batch),
        token_fill=statistics.fmean(step.rows for step in prefills) / after.step_tokens if prefills else 0.0,
        padding=padding / max(1, computed + padding),
        preemptions=after.preemptions - before.preemptions,
        processors=own,
        others=others,
        processors_there=os.cpu_count() or 1,
    )
