"""A page of pictures of a profile: one HTML file that loads nothing else.

It has the parts of the time as a bar, a timeline of the engine, the event loop and every request, a roofline with a
point for each step, and the durations of the decode steps. Light and dark follow the browser.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from backend.profiling.attribution import window_of
from backend.profiling.figures import Profile
from backend.profiling.instrumentation import WAITING, Recorder, Span, StepRecord
from backend.profiling.machine import Machine
from backend.profiling.profile import Run
from backend.profiling.replay import RequestRecord
from backend.profiling.report import as_json, as_text, milliseconds
from backend.profiling.trace_files import phases_in_order, write_timeline
from backend.profiling.work import ModelWork

_CLASSES = {
    "prefill": "prefill",
    "decode": "decode",
    "mixed": "mixed",
    "tokenise": "tokenise",
    "queue": "queue",
    "sampling": "sampling",
}
"""Colours by name; all others have that of Python."""
_WIDTH, _HEIGHT, _MARGIN = 720, 360, 56
_SHORTEST = 1 / 20_000
"""Of the run: what is shorter is left out of the timeline."""
_MOST_REQUESTS = 60
_MOST_STEPS = 2000
"""In one picture."""


def write_files(run: Run, folder: Path) -> None:
    """Writes the page, the timeline for Perfetto and all figures into a folder. Raises OSError."""
    (folder / "profile.html").write_text(page(run), encoding="utf-8")
    (folder / "profile.json").write_text(json.dumps(as_json(run.profile), indent=2), encoding="utf-8")
    observed = run.observed
    write_timeline(folder / "timeline.json", observed.records, observed.recorder, observed.work, observed.machine)


def page(run: Run) -> str:
    """The page, in HTML."""
    profile, observed = run.profile, run.observed
    template = resources.files("backend.profiling").joinpath("page.html").read_text(encoding="utf-8")
    title = f"{profile.model} on {profile.runner}"
    parts = {
        "TITLE": html.escape(title),
        "BOTTLENECK": html.escape(profile.bottleneck),
        "REMARK": f"<p>But: {html.escape(profile.remark)}.</p>" if profile.remark else "",
        "PARTS": _bar(profile),
        "LEGEND": _legend(),
        "TIMELINE": _timeline(observed.records, observed.recorder),
        "ROOFLINE": _roofline(observed.recorder, observed.work, observed.machine),
        "DURATIONS": _durations(observed.recorder),
        "TABLES": html.escape(as_text(profile)),
    }
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text)
    return template


def _class(name: str) -> str:
    return _CLASSES.get(name, "python")


def _legend() -> str:
    names = [*_CLASSES, "Python and the rest"]
    return "".join(f'<li><i class="{_class(name)}"></i>{html.escape(name)}</li>' for name in names)


def _bar(profile: Profile) -> str:
    """The parts of the wall time, side by side."""
    shares = [(part.name, part.seconds / profile.wall_seconds, part.seconds) for part in profile.parts]
    return "".join(
        f'<span class="{_class(name)}" style="width:{100 * share:.3f}%" '
        f'title="{html.escape(name)}: {milliseconds(seconds)}, {share:.1%}">{name if share > 0.08 else ""}</span>'
        for name, share, seconds in shares
        if share > 0
    )


def _timeline(records: Sequence[RequestRecord], recorder: Recorder) -> str:
    """Lanes from top to bottom: the engine's steps with their parts over them, the event loop, and the requests."""
    window = window_of(records)
    lanes: list[tuple[str, list[Span]]] = [
        ("engine", [span for span in recorder.engine if span.name != WAITING]),
        ("event loop", [span for span in recorder.loop if span.name != "prefix store"]),
        *((record.name.rpartition(": ")[2], phases_in_order(record)) for record in records[:_MOST_REQUESTS]),
    ]
    labels = "".join(f"<div>{html.escape(name)}</div>" for name, _ in lanes)
    rows = "".join(f"<div>{''.join(_boxes(spans, window))}</div>" for _, spans in lanes)
    ticks = "".join(
        f'<span style="left:{tick}%">{milliseconds((window[1] - window[0]) * tick / 100)}</span>'
        for tick in range(0, 100, 10)
    )
    more = len(records) - _MOST_REQUESTS
    left_out = f"<p>{more} more requests are in timeline.json.</p>" if more > 0 else ""
    return (
        f'<div class="lanes"><div class="labels"><div></div>{labels}</div><div class="scroll" tabindex="0" '
        f'aria-label="Timeline; scroll it with the arrow keys"><div class="time"><div class="ticks">{ticks}</div>{rows}'
        f"</div></div></div>{left_out}"
    )


def _boxes(spans: Iterable[Span], window: tuple[float, float]) -> Iterable[str]:
    whole = window[1] - window[0]
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        start, end = max(span.start, window[0]), min(span.end, window[1])
        if end - start < _SHORTEST * whole:
            continue
        left, width = 100 * (start - window[0]) / whole, 100 * (end - start) / whole
        title = f"{html.escape(span.name)}: {milliseconds(span.seconds)}"
        yield f'<i class="{_class(span.name)}" style="left:{left:.4f}%;width:{width:.4f}%" title="{title}"></i>'


def _roofline(recorder: Recorder, work: ModelWork, machine: Machine) -> str:
    """Operations a second against operations a byte, both on logarithmic scales, under the measured roof."""
    points = [
        (step, its.intensity, its.flops / step.model_seconds)
        for step in _some(recorder.steps)
        if step.model_seconds
        for its in [work.of(step)]
    ]
    ridge = machine.flops_per_second / machine.bytes_per_second
    left, right = _decades([ridge, *(intensity for _, intensity, _ in points)])
    low, high = _decades(
        [machine.flops_per_second, left * machine.bytes_per_second, *(speed for _, _, speed in points)]
    )

    def x(intensity: float) -> float:
        return _MARGIN + (_WIDTH - 2 * _MARGIN) * math.log(intensity / left) / math.log(right / left)

    def y(speed: float) -> float:
        return _HEIGHT - _MARGIN + (2 * _MARGIN - _HEIGHT) * math.log(speed / low) / math.log(high / low)

    roof = [
        (left, left * machine.bytes_per_second),
        (ridge, machine.flops_per_second),
        (right, machine.flops_per_second),
    ]
    line = " ".join(f"{x(intensity):.1f},{y(speed):.1f}" for intensity, speed in roof)
    dots = "".join(
        f'<circle class="{step.kind}" cx="{x(intensity):.1f}" cy="{y(speed):.1f}" r="3"><title>{step.kind}: '
        f"{step.sequences} sequences, {step.rows} tokens, {milliseconds(step.model_seconds)}: {intensity:.1f} "
        f"operations a byte, {speed / 1e9:.1f} GFLOP/s</title></circle>"
        for step, intensity, speed in points
    )
    grid = "".join(
        f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_MARGIN}" y2="{_HEIGHT - _MARGIN}"/>'
        f'<text x="{x(at):.1f}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{at:g}</text>'
        for at in _powers(left, right)
    ) + "".join(
        f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y(at):.1f}" y2="{y(at):.1f}"/>'
        f'<text x="{_MARGIN - 8}" y="{y(at) + 4:.1f}" text-anchor="end">{at / 1e9:g}</text>'
        for at in _powers(low, high)
    )
    said = f"{machine.bytes_per_second / 1e9:.1f} GB/s and {machine.flops_per_second / 1e9:.0f} GFLOP/s"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Roofline: {said}">{grid}'
        f'<polyline class="roof" points="{line}"/>{dots}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" text-anchor="middle">operations for each byte moved</text>'
        f'<text x="{_MARGIN}" y="{_MARGIN - 14}">GFLOP/s; the roof is what was measured: {said}</text></svg>'
    )


def _some(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """As many of them as a picture bears, evenly chosen."""
    return steps[:: max(1, math.ceil(len(steps) / _MOST_STEPS))]


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """The powers of ten around them."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _powers(low: float, high: float) -> list[float]:
    return [low * 10.0**power for power in range(round(math.log10(high / low)) + 1)]


def _durations(recorder: Recorder) -> str:
    """Decode steps in their order: bars as high as they took long."""
    all_steps = [step for step in recorder.steps if step.kind == "decode" and step.step_seconds]
    steps = _some(all_steps)
    if not steps:
        return "<p>There was no step that only decodes.</p>"
    longest = max(step.step_seconds for step in steps)
    width = (_WIDTH - 2 * _MARGIN) / len(steps)
    bars = "".join(
        f'<rect class="decode" x="{_MARGIN + index * width:.2f}" y="{_HEIGHT / 2 - height:.1f}" '
        f'width="{max(0.5, width - 0.5):.2f}" height="{height:.1f}"><title>{step.sequences} sequences: '
        f"{milliseconds(step.step_seconds)}</title></rect>"
        for index, step in enumerate(steps)
        for height in [(_HEIGHT / 2 - _MARGIN / 2) * step.step_seconds / longest]
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT / 2 + 24}" role="img" aria-label="Durations of decode steps">{bars}'
        f'<text x="{_MARGIN}" y="{_MARGIN / 2 - 6}">the longest: {milliseconds(longest)}</text>'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT / 2 + 18}" text-anchor="middle">{len(steps)} of {len(all_steps)} decode '
        "steps, in their order</text></svg>"
    )
