"""The report: docs/benchmarks.md, made of the saved measurements and of nothing else."""

from pathlib import Path

from benchmarks.figure import FIGURES, OPTIONAL_FIGURES, CannotReport, Figure, Measurement, Row, load
from benchmarks.processes import ROOT

REPORT = ROOT / "docs" / "benchmarks.md"

_INTRODUCTION = """\
# Benchmarks

Written by `make bench` from the files in [benchmarks/results](../benchmarks/results), which hold every round. Where a
figure is a ratio, both sides ran in the same run, by turns. The figure of a line is the median of its rounds, or their
maximum where it says so; the spread is the smallest and the largest round.

To measure again: `make bench`, or one figure with `make bench ARGS=exact_hits`. It needs two cores and
[wrk](https://github.com/wg/wrk) (`apt-get install wrk`). A machine that does something else at the same time shows in
the spread.
"""


def render(folder: Path) -> str:
    """The whole report. Raises CannotReport where a figure is missing, is not whole, or was measured in a hurry."""
    there = (figure for figure in OPTIONAL_FIGURES if (folder / f"{figure}.json").exists())
    measurements = [load(figure, folder) for figure in (*FIGURES, *there)]
    for measurement in measurements:
        if measurement.quick:
            name = measurement.figure.figure
            raise CannotReport(f"{name}.json: is of a --quick run; `python -m benchmarks {name}` measures it.")
    parts = [_INTRODUCTION, _summary(measurements), *(_section(m) for m in measurements)]
    return "\n".join(parts)


def format_report(figure: Figure, row: Row) -> str:
    """A row for a person at a terminal."""
    verdict = figure.verdict(row)
    target = f", target {_target(row)}" if row.target else ""
    return f"{row.what}: {_number(row.measured)} {row.unit}{target}: {verdict} (spread {_spread(row)})"


def _summary(measurements: list[Measurement]) -> str:
    rows = [(m.figure, row) for m in measurements for row in m.figure.rows if row.target]
    missed = [(figure, row) for figure, row in rows if figure.verdict(row) == "not met"]
    text = f"Of {len(rows)} targets {len(rows) - len(missed)} are met."
    if missed:
        text += " Not met:\n\n" + "\n".join(
            f"- {figure.title}, {row.what}: {_number(row.measured)} {row.unit}, target {_target(row)}"
            for figure, row in missed
        )
    return text + "\n"


def _section(measurement: Measurement) -> str:
    figure = measurement.figure
    lines = [f"## {figure.title}", "", figure.method, ""]
    lines += ["| what | target | measured | spread | |", "|---|---|---|---|---|"]
    for row in figure.rows:
        verdict = figure.verdict(row).replace("not met", "**not met**")
        summary = " (maximum)" if row.summary == "maximum" and len(row.rounds) > 1 else ""
        measured = f"{_number(row.measured)} {row.unit}{summary}"
        lines.append(f"| {row.what} | {_target(row)} | {measured} | {_spread(row)} | {verdict} |")
    for row in figure.rows:
        lines += _beside(row)
    about = ", ".join(f"{name} {value}" for name, value in measurement.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in measurement.versions.items())
    lines += [
        "",
        f"Measured {measurement.date} at commit {measurement.commit}, in {measurement.seconds:.0f} s; {about}; "
        f"{versions}.",
        f"Again: `make bench ARGS={figure.figure}`. Rounds: [{figure.figure}.json]"
        f"(../benchmarks/results/{figure.figure}.json).",
        "",
    ]
    return "\n".join(lines)


def _beside(row: Row) -> list[str]:
    """The medians of what stood behind a row's rounds."""
    if not row.beside:
        return []
    columns: dict[str, list[float]] = {}
    for entry in row.beside:
        for name, value in entry.items():
            if isinstance(value, (int, float)):
                columns.setdefault(name, []).append(float(value))
    if len(row.beside) == 1:
        said = ", ".join(f"{name} {_number(values[0])}" for name, values in columns.items())
        return ["", f"{row.what}: {said}."]
    said = ", ".join(f"{name} {_number(sorted(values)[len(values) // 2])}" for name, values in columns.items())
    return ["", f"{row.what}, medians: {said}."]


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    sign = "≥" if row.target.at == "least" else "≤"
    aim = f", aim {_number(row.target.aim)}" if row.target.aim is not None else ""
    return f"{sign} {_number(row.target.value)} {row.unit}{aim}"


def _spread(row: Row) -> str:
    if len(row.rounds) == 1:
        return "one round"
    return f"{_number(min(row.rounds))} to {_number(max(row.rounds))}"


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
