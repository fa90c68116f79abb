"""A profile as tables for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from backend.profiling.figures import Profile, Quantiles
from backend.profiling.trials import Measurement, Trials

_PHASES = (
    ("tokenise", "tokenise"),
    ("prefix_store", "prefix store"),
    ("queue", "queue"),
    ("prefill", "prefill"),
    ("decode", "decode"),
    ("finish", "finish"),
)


_MOST_OPERATORS = 8
_COLUMNS = 112


def as_json(profile: Profile) -> dict[str, Any]:
    """All figures; times in seconds, sizes in bytes."""
    return dataclasses.asdict(profile)


def as_text(profile: Profile) -> str:
    """The tables."""
    sections = [
        _head(profile),
        _parts(profile),
        _requests(profile),
        _steps(profile),
        _use(profile),
        _memory(profile),
        _roofs(profile),
    ]
    if profile.operators:
        sections.append(_operators(profile))
    if profile.trials is not None:
        sections.append(_trials(profile.trials))
    if profile.cost is not None:
        cost = profile.cost
        sections.append(
            [
                f"cost at ${cost.price_per_hour:g} an hour: ${cost.per_1k_generated:.6f} for 1,000 generated tokens, "
                f"${cost.per_1k_tokens:.6f} for 1,000 tokens of prompts and answers"
            ]
        )
    return "\n\n".join("\n".join(section) for section in sections)


def _head(profile: Profile) -> list[str]:
    work = profile.workload
    return [
        f"{profile.model} on {profile.runner}: {work.requests} requests ({work.source}), {work.concurrency} at a time",
        f"{work.prompt_tokens:,} tokens of prompts, {work.cached_tokens:,} of them cached; {work.generated_tokens:,} "
        f"generated in {profile.wall_seconds:.2f} s: {profile.generated_per_second:.1f} tokens/s, and "
        f"{profile.prompt_tokens_per_second:.1f} tokens/s of prompts",
        "",
        *_wrapped(f"bottleneck: {profile.bottleneck}"),
        *([f"but: {profile.remark}"] if profile.remark else []),
    ]


def _parts(profile: Profile) -> list[str]:
    lines = [f"{'where the time went':<22}{'time':>12}{'share':>8}{'beside':>12}"]
    for part in profile.parts:
        beside = milliseconds(part.beside) if part.beside else ""
        lines.append(
            f"  {part.name:<20}{milliseconds(part.seconds):>12}{part.seconds / profile.wall_seconds:>8.1%}"
            f"{beside:>12}  {part.about}"
        )
    total = sum(part.seconds for part in profile.parts)
    return [*lines, f"  {'wall time':<20}{milliseconds(total):>12}{total / profile.wall_seconds:>8.1%}"]


def _requests(profile: Profile) -> list[str]:
    phases, lines = profile.phases, [f"{'a request, mean':<22}{'time':>12}{'share':>8}"]
    for field, name in _PHASES:
        seconds: float = getattr(phases, field)
        lines.append(f"  {name:<20}{milliseconds(seconds):>12}{seconds / phases.total:>8.1%}")
    lines += [f"  {'in all':<20}{milliseconds(phases.total):>12}", "", _row("", ("p50", "p90", "p99", "worst"))]
    lines.append(_row("TTFT", _shown(profile.ttft)))
    if profile.itl is not None:
        lines.append(_row("ITL", _shown(profile.itl)))
    return lines


def _steps(profile: Profile) -> list[str]:
    lines = [
        f"{'steps':<22}{'count':>8}{'total':>12}{'p50':>12}{'p90':>12}{'p99':>12}{'worst':>12}{'tokens/s':>12}",
    ]
    for figure in profile.steps:
        name = f"  {figure.kind}" if figure.batch is None else f"    batch of {figure.batch}"
        times = "".join(f"{text:>12}" for text in (milliseconds(figure.total), *_shown(figure.duration)))
        lines.append(f"{name:<22}{figure.count:>8}{times}{figure.tokens_per_second:>12.1f}")
    return lines


def _use(profile: Profile) -> list[str]:
    use = profile.utilisation
    return [
        f"engine busy {use.busy:.1%} of the time, {use.python:.1%} of that in Python; processors used: "
        f"{use.processors:.2f} here, {use.others:.2f} by other programs, of {use.processors_there}",
        f"batch {use.batch_fill:.1%} full; "
        f"steps with prompts {use.token_fill:.1%} full; padding {use.padding:.1%}; {use.preemptions} preemptions",
    ]


def _memory(profile: Profile) -> list[str]:
    memory = profile.memory
    kv = f"{size(memory.kv_in_use)} held by sequences at the peak, of {size(memory.kv_allocated)} allocated"
    rows = (
        ("weights", memory.weights, ""),
        ("KV blocks", memory.kv_there, kv),
        ("activations", memory.activations, "buffers of steps, logits, and what requests hold, at the peak"),
        ("rest", memory.rest, "interpreter, libraries, tokenizer, requests"),
        ("in all, at the peak", memory.total, ""),
    )
    return [f"memory of {memory.where}"] + [
        f"  {name:<20}{size(value):>12}  {about}".rstrip() for name, value, about in rows
    ]


def _roofs(profile: Profile) -> list[str]:
    machine = profile.machine
    names = ("moved", "GFLOP", "memory", "arithmetic", "around it", "took")
    lines = [
        f"{machine.device}, {machine.threads} threads, measured: {machine.bytes_per_second / 1e9:.1f} GB/s of memory, "
        f"{machine.flops_per_second / 1e9:.0f} GFLOP/s in {machine.dtype}",
        f"{'  a step, mean':<22}" + "".join(f"{name:>12}" for name in names),
    ]
    for roof in profile.roofs:
        times = (roof.memory_seconds, roof.arithmetic_seconds, roof.python_seconds, roof.seconds)
        lines.append(
            f"  {roof.kind:<20}{size(roof.weight_bytes + roof.kv_bytes):>12}{roof.flops / 1e9:>12.3f}"
            + "".join(f"{milliseconds(seconds):>12}" for seconds in times)
        )
    return lines + [line for roof in profile.roofs for line in _wrapped(f"  {roof.sentence}")]


def _operators(profile: Profile) -> list[str]:
    lines = [f"{'operators, some steps':<40}{'count':>8}{'time':>12}{'on device':>12}"]
    for one in profile.operators[:_MOST_OPERATORS]:
        times = f"{milliseconds(one.seconds):>12}{milliseconds(one.device_seconds):>12}"
        lines.append(f"  {one.name[:37]:<38}{one.count:>8}{times}")
    return lines


def _trials(trials: Trials) -> list[str]:
    """What was tried, with the settings as they are beside each."""
    lines = [f"{'tried':<22}" + "".join(f"{name:>12}{'':>12}" for name in ("tokens/s", "TTFT", "ITL")).rstrip()]
    for trial in trials.changes:
        if trial.before is not None and trial.after is not None:
            if len(lines) == 1:
                lines.append(_measured("as it is", trial.before, None))
            lines.append(_measured(trial.name, trial.after, trial.ratio))
    for trial in trials.changes:
        lines += _wrapped(f"  {trial.name}: {trial.verdict}: {trial.reason}")
        lines += _wrapped(f"    {trial.about}")
    lines.append(f"  rounds: {trials.rounds}; other programs used {trials.others:.2f} processors meanwhile")
    return lines


def _measured(name: str, measured: Measurement, ratio: Measurement | None) -> str:
    texts = [f"{measured.generated_per_second:.1f}", milliseconds(measured.ttft), milliseconds(measured.itl)]
    ratios = (
        ["", "", ""]
        if ratio is None
        else [f"({each:.2f} x)" for each in (ratio.generated_per_second, ratio.ttft, ratio.itl)]
    )
    return _row(name, tuple(text for pair in zip(texts, ratios, strict=True) for text in pair)).rstrip()


def _wrapped(text: str) -> list[str]:
    """Lines of a terminal; those after the first are indented further than it."""
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(
        text.strip(), _COLUMNS, initial_indent=indent, subsequent_indent=f"{indent}  ", break_long_words=False
    )


def _row(name: str, texts: tuple[str, ...]) -> str:
    return f"  {name:<20}" + "".join(f"{text:>12}" for text in texts)


def _shown(times: Quantiles) -> tuple[str, ...]:
    return tuple(map(milliseconds, (times.p50, times.p90, times.p99, times.worst)))


def milliseconds(seconds: float) -> str:
    """A duration for people, in milliseconds."""
    return f"{1000 * seconds:,.2f} ms" if seconds < 0.1 else f"{1000 * seconds:,.0f} ms"


def size(count: float) -> str:
    """A number of bytes for people."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"
