"""Names what bounds each kind of step: memory bandwidth, arithmetic, Python, or none of them; with the calculation.

A step cannot be faster than its bytes take at the measured bandwidth, nor than its operations take at the measured
peak (the roofline model: Williams, Waterman, Patterson, CACM 2009). Python runs before and after, so it adds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backend.profiling.attribution import Part
from backend.profiling.instrumentation import Kind, StepRecord
from backend.profiling.machine import Machine
from backend.profiling.work import ModelWork

Limit = Literal["memory bandwidth", "arithmetic", "Python", "none of them"]
_SHARE = 0.4
"""What takes less of a step does not bound it."""
_NOT_MODEL = {
    "tokenise": "the engine waits for prompts to be checked and encoded",
    "respond": "the engine waits for the event loop, which builds answers",
    "deliver": "the engine waits for the event loop, which delivers tokens",
    "prefix store": "the engine waits for the prefix store",
    "sampling": "choosing tokens takes longer than computing them",
    "idle": "the engine has nothing to do: more requests at a time would use it",
}


@dataclass(frozen=True, slots=True)
class Roof:
    """One kind of steps against what the machine can do. Means over the steps; times in seconds."""

    kind: Kind
    steps: int
    seconds: float
    """Of a step, Python included."""
    model_seconds: float
    tokens: float
    weight_bytes: float
    kv_bytes: float
    flops: float
    memory_seconds: float
    """Its bytes at the measured bandwidth."""
    arithmetic_seconds: float
    """Its operations at the measured peak."""
    python_seconds: float
    """Around the runner: Python, and sampling."""
    limit: Limit
    sentence: str


def roofs_of(steps: Sequence[StepRecord], work: ModelWork, machine: Machine) -> list[Roof]:
    """One for each kind of which there are steps, that which took longest first."""
    kinds: dict[Kind, list[StepRecord]] = {}
    for step in steps:
        if step.step_seconds:
            kinds.setdefault(step.kind, []).append(step)
    roofs = [_roof(kind, some, work, machine) for kind, some in kinds.items()]
    return sorted(roofs, key=lambda roof: -roof.steps * roof.seconds)


def named(parts: Sequence[Part], roofs: Sequence[Roof]) -> str:
    """The bottleneck of the run in a sentence: the part that takes most of its time, and what bounds that."""
    wall = sum(part.seconds for part in parts)
    most = max(parts, key=lambda part: part.seconds)
    roof = next((roof for roof in roofs if roof.kind == most.name), None)
    share = f"{most.seconds / wall:.0%} of the time"
    if roof is not None:
        return f"{share} goes into {roof.kind} steps. {roof.sentence}"
    return f"{share} is {most.name}: {_NOT_MODEL.get(most.name, 'the bottleneck is Python, not the model')}"


def _roof(kind: Kind, steps: Sequence[StepRecord], work: ModelWork, machine: Machine) -> Roof:
    each = [work.of(step) for step in steps]
    seconds = statistics.fmean(step.step_seconds for step in steps)
    model_seconds = statistics.fmean(step.model_seconds for step in steps)
    tokens = statistics.fmean(step.rows for step in steps)
    weights = statistics.fmean(one.weight_bytes for one in each)
    kv = statistics.fmean(one.kv_bytes for one in each)
    flops = statistics.fmean(one.flops for one in each)
    memory_seconds = (weights + kv) / machine.bytes_per_second
    arithmetic_seconds = flops / machine.flops_per_second
    python_seconds = max(0.0, seconds - model_seconds)
    times: dict[Limit, float] = {
        "memory bandwidth": memory_seconds,
        "arithmetic": arithmetic_seconds,
        "Python": python_seconds,
    }
    limit = max(times, key=lambda name: times[name])
    if times[limit] < _SHARE * seconds:
        limit = "none of them"
    sums = {
        "memory bandwidth": f"{_bytes(weights)} of weights and {_bytes(kv)} of keys and values per step / "
        f"{machine.bytes_per_second / 1e9:.1f} GB/s = {_ms(memory_seconds)}",
        "arithmetic": f"{tokens:.0f} tokens of {flops / tokens / 1e9:.2f} GFLOP per step / "
        f"{machine.flops_per_second / 1e9:.0f} GFLOP/s = {_ms(arithmetic_seconds)}",
        "Python": f"{_ms(python_seconds)} of Python and sampling around the model",
    }
    if limit == "none of them":
        sentence = (
            f"{kind}: neither memory bandwidth ({_ms(memory_seconds)}), arithmetic ({_ms(arithmetic_seconds)}) nor "
            f"Python ({_ms(python_seconds)}) explains the {_ms(seconds)} step: launching many small kernels, threads "
            "that wait for each other, or other programs on the processors do"
        )
    else:
        sentence = f"{kind}: {limit}: {sums[limit]} of the {_ms(seconds)} step"
    return Roof(
        kind,
        len(steps),
        seconds,
        model_seconds,
        tokens,
        weights,
        kv,
        flops,
        memory_seconds,
        arithmetic_seconds,
        python_seconds,
        limit,
        sentence,
    )


def _bytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB" if size >= 1e7 else f"{size / 1e6:.1f} MB"


def _ms(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return (
        f"{milliseconds:.0f} ms"
        if milliseconds >= 20
        else f"{milliseconds:.1f} ms"
        if milliseconds >= 1
        else f"{milliseconds:.2g} ms"
    )
