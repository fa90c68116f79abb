"""The report: docs/benchmarks/, made of the saved measurements and of nothing else.

`index.md` is one screen: the headline figures and their charts, and every target that is not met. The tables of all
figures are on a page per subject.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.chart import Bar, bar_chart
from benchmarks.harness.measurement import FIGURES, OPTIONAL_FIGURES, CannotReport, Figure, Measurement, Row, load
from benchmarks.harness.processes import ROOT

REPORT = ROOT / "docs" / "benchmarks"

_PAGES = {
    "gateway": ("exact-cache", "Gateway and exact cache"),
    "semantic": ("semantic-cache", "Semantic cache"),
    "prefix": ("prefix-store", "Prefix store"),
    "vllm": ("vllm", "Prefix store under vLLM"),
    "engine": ("engine", "Engine"),
    "quantization": ("quantization", "Quantised weights"),
}
"""The page and its title of each folder of figures."""


class Headline(NamedTuple):
    """A line of the first table: a row of a figure, and the rows of others that stand beside it."""

    text: str
    figure: str
    row: str
    beside: Sequence[tuple[str, str]] = ()
    reference: str = ""


HEADLINES = (
    Headline("exact hits per second, one core", "exact_hits", "chat, 300 B", reference="a bare aiohttp handler: 1"),
    Headline("latency added on a miss, p50", "miss_latency", "p50, upstream of 50 ms, about 320 requests/s"),
    Headline("requests that fail while Redis hangs", "frozen_redis", "failed requests"),
    Headline("memory at rest", "memory", "at rest"),
    Headline(
        "semantic hits, Banking77",
        "semantic_peers",
        "Banking77, hits: Keepgate",
        [("Banking77, hits: GPTCache, default", "GPTCache"), ("Banking77, hits: RedisVL, default", "RedisVL")],
    ),
    Headline(
        "of these wrong, per request",
        "semantic_peers",
        "Banking77, wrong: Keepgate",
        [("Banking77, wrong: GPTCache, default", "GPTCache"), ("Banking77, wrong: RedisVL, default", "RedisVL")],
    ),
    Headline(
        "semantic look-up, p50",
        "semantic_peers",
        "Banking77, look-up p50: Keepgate",
        [
            ("Banking77, look-up p50: GPTCache, default", "GPTCache"),
            ("Banking77, look-up p50: RedisVL, default", "RedisVL"),
        ],
    ),
    Headline(
        "first token on a stored prefix of 1,500 tokens",
        "prefix_ttft",
        "prefix from host memory, against computing it",
        reference="computing it: 1",
    ),
    Headline(
        "index lookup of a 1,000-block prompt",
        "prefix_index",
        "1,000-block prompt, 700 present: one lookup, p50",
        [("1,000-block prompt, 700 present: pipelined HKEYS, p50", "pipelined HKEYS")],
    ),
    Headline(
        "hit ratio of the conversation trace, 20,000 blocks",
        "prefix_replay",
        "conversation trace, 20,000 blocks: block hit ratio",
    ),
    Headline(
        "decode, batch 8",
        "decode",
        "batch 8, against transformers generate",
        reference="transformers generate: 1",
    ),
    Headline(
        "decode, batch 8, 4-bit weights",
        "engines",
        "decode, batch 8: Keepgate int4",
        [("decode, batch 8: llama.cpp Q4_0", "llama.cpp Q4_0"), ("decode, batch 8: vLLM", "vLLM float32")],
    ),
)


class Chart(NamedTuple):
    name: str
    title: str
    figure: str
    rows: Sequence[tuple[str, str]]
    """Row and label; labels that begin with Keepgate are highlighted."""


CHARTS = (
    Chart(
        "engines",
        "Decode at batch 8, tokens per second (SmolLM2-135M, 2 threads)",
        "engines",
        [
            ("decode, batch 8: Keepgate int4", "Keepgate int4"),
            ("decode, batch 8: Keepgate int8", "Keepgate int8"),
            ("decode, batch 8: Keepgate", "Keepgate float16"),
            ("decode, batch 8: llama.cpp Q4_0", "llama.cpp Q4_0"),
            ("decode, batch 8: llama.cpp Q4_1", "llama.cpp Q4_1"),
            ("decode, batch 8: vLLM", "vLLM float32"),
        ],
    ),
    Chart(
        "semantic-wrong",
        "Wrong answers per request, Banking77",
        "semantic_peers",
        [
            ("Banking77, wrong: Keepgate", "Keepgate, delta .01"),
            ("Banking77, wrong: GPTCache, default", "GPTCache, default"),
            ("Banking77, wrong: RedisVL, default", "RedisVL, default"),
        ],
    ),
    Chart(
        "first-token",
        "First token on a prefix of 1,500 tokens, share of the time to compute it (line: target)",
        "prefix_ttft",
        [
            ("prefix from host memory, against computing it", "Keepgate, host memory"),
            ("prefix from disk, written by another process, against computing it", "Keepgate, disk"),
            ("prefix from another engine over HTTP, against computing it", "Keepgate, another engine"),
        ],
    ),
    Chart(
        "exact-hits",
        "Exact hits, ratio to a bare aiohttp handler (line: target)",
        "exact_hits",
        [
            ("chat, 300 B", "Keepgate, chat 300 B"),
            ("chat with 37 tools, 26 KB", "Keepgate, chat 26 KB"),
            ("streamed chat, 300 B", "Keepgate, streamed"),
            ("chat, 300 B, one header varies", "Keepgate, a header varies"),
        ],
    ),
)


def render(folder: Path) -> dict[str, str]:
    """All files of the report by name. Raises CannotReport where a figure is missing, incomplete, or of a quick run."""
    there = (figure for figure in OPTIONAL_FIGURES if (folder / f"{figure}.json").exists())
    measurements = {figure: load(figure, folder) for figure in (*FIGURES, *there)}
    for name, measurement in measurements.items():
        if measurement.quick:
            raise CannotReport(f"{name}.json: is of a --quick run; `python -m benchmarks {name}` measures it.")
    files = {"index.md": _index(measurements)}
    for subpackage, (page, title) in _PAGES.items():
        sections = [_section(m) for name, m in measurements.items() if _subpackage(name) == subpackage]
        files[f"{page}.md"] = "\n".join([f"# {title}\n", *sections])
    for chart in _charts(measurements):
        files[f"{chart.name}.svg"] = _drawn(chart, measurements[chart.figure].figure)
    return files


def _headlines(measurements: Mapping[str, Measurement]) -> list[Headline]:
    """Those of the first table whose rows have been measured."""
    return [line for line in HEADLINES if _has(measurements, line.figure, [line.row, *(row for row, _ in line.beside)])]


def _charts(measurements: Mapping[str, Measurement]) -> list[Chart]:
    return [chart for chart in CHARTS if _has(measurements, chart.figure, [row for row, _ in chart.rows])]


def _has(measurements: Mapping[str, Measurement], figure: str, rows: Sequence[str]) -> bool:
    return figure in measurements and {row.what for row in measurements[figure].figure.rows}.issuperset(rows)


def write(files: Mapping[str, str]) -> None:
    """Write the report, and remove files that are no longer part of it."""
    REPORT.mkdir(exist_ok=True)
    for old in REPORT.iterdir():
        if old.name not in files:
            old.unlink()
    for name, text in files.items():
        (REPORT / name).write_text(text, encoding="utf-8")


def format_row(figure: Figure, row: Row) -> str:
    """A row as a line for a terminal."""
    target = f", target {_target(row)}" if row.target else ""
    return f"{row.what}: {_quantity(row)}{target}: {figure.verdict(row)} (spread {_spread(row)})"


def _subpackage(figure: str) -> str:
    return (FIGURES | OPTIONAL_FIGURES)[figure].split(".")[0]


def _index(measurements: Mapping[str, Measurement]) -> str:
    lines = [
        "# Benchmarks",
        "",
        "Each figure is measured against a reference in the same run, by turns, and is the median of its rounds.",
        "`make bench` measures all of them, and writes these pages.",
        "",
        "| | Keepgate | | target | beside |",
        "|---|---|---|---|---|",
        *(_headline(line, measurements[line.figure].figure) for line in _headlines(measurements)),
        "",
        *(f"![{chart.title}]({chart.name}.svg)\n" for chart in _charts(measurements)),
        _not_met(measurements),
        "## All figures",
        "",
        "| page | figures | processor, date |",
        "|---|---|---|",
    ]
    for subpackage, (page, title) in _PAGES.items():
        of_subpackage = [m for name, m in measurements.items() if _subpackage(name) == subpackage]
        machines = sorted({f"{m.machine.get('gpu') or m.machine['cpu']}, {m.date}" for m in of_subpackage})
        titles = ", ".join(m.figure.title for m in of_subpackage)
        lines.append(f"| [{title}]({page}.md) | {titles} | {'; '.join(machines)} |")
    lines += [
        "",
        "`make bench ARGS=exact_hits` measures one figure. It needs two cores and [wrk](https://github.com/wg/wrk)",
        "(`apt-get install wrk`). Load of other programs shows in the spread, the smallest and the largest round.",
        "Every round is in `benchmarks/results/`. `make bench-gpu` is for a machine with a GPU.",
    ]
    return "\n".join(lines) + "\n"


def _headline(line: Headline, figure: Figure) -> str:
    row = _row(figure, line.row)
    beside = "; ".join(f"{label} {_quantity(_row(figure, what))}" for what, label in line.beside)
    verdict = figure.verdict(row).replace("not met", "**not met**") if row.target else ""
    return f"| {line.text} | {_quantity(row)} | {verdict} | {_target(row)} | {beside or line.reference} |"


def _not_met(measurements: Mapping[str, Measurement]) -> str:
    rows = [(name, m.figure, row) for name, m in measurements.items() for row in m.figure.rows if row.target]
    missed = [(name, figure, row) for name, figure, row in rows if figure.verdict(row) == "not met"]
    lines = ["## Targets", "", f"{len(rows) - len(missed)} of {len(rows)} targets are met.", ""]
    if missed:
        lines += ["| not met | measured | target |", "|---|---|---|"]
    for name, figure, row in missed:
        page = _PAGES[_subpackage(name)][0]
        lines.append(f"| [{figure.title}]({page}.md): {row.what} | {_quantity(row)} | {_target(row)} |")
    return "\n".join([*lines, ""])


def _drawn(chart: Chart, figure: Figure) -> str:
    bars: list[Bar] = []
    for what, label in chart.rows:
        row = _row(figure, what)
        target = row.target.value if row.target else None
        bars.append(Bar(label, row.measured, _quantity(row), label.startswith("Keepgate"), target))
    return bar_chart(chart.title, bars)


def _row(figure: Figure, what: str) -> Row:
    return next(row for row in figure.rows if row.what == what)


def _section(measurement: Measurement) -> str:
    figure = measurement.figure
    lines = [f"## {figure.title}", "", figure.method, ""]
    lines += ["| what | target | measured | spread | |", "|---|---|---|---|---|"]
    for row in figure.rows:
        verdict = figure.verdict(row).replace("not met", "**not met**")
        summary = " (maximum)" if row.summary == "maximum" and len(row.rounds) > 1 else ""
        measured = f"{_quantity(row)}{summary}"
        lines.append(f"| {row.what} | {_target(row)} | {measured} | {_spread(row)} | {verdict} |")
    lines += _beside(figure.rows)
    about = ", ".join(f"{name} {value}" for name, value in measurement.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in measurement.versions.items())
    lines += [
        "",
        f"Measured {measurement.date} at commit {measurement.commit}, in {measurement.seconds:.0f} s; {about}; "
        f"{versions}. Again: `make bench ARGS={figure.figure}`; rounds: `benchmarks/results/{figure.figure}.json`.",
        "",
    ]
    return "\n".join(lines)


def _beside(rows: Sequence[Row]) -> list[str]:
    """The medians of what was measured together with the rows, folded."""
    lines: list[str] = []
    for row in rows:
        columns: dict[str, list[float]] = {}
        for entry in row.beside:
            for name, value in entry.items():
                if isinstance(value, (int, float)):
                    columns.setdefault(name, []).append(float(value))
        if columns:
            texts = (f"{name} {_number(sorted(values)[len(values) // 2])}" for name, values in columns.items())
            lines.append(f"| {row.what} | {', '.join(texts)} |")
    if not lines:
        return []
    summary = '<details markdown="1"><summary>Measured together with these: medians</summary>'
    return ["", summary, "", "| what | |", "|---|---|", *lines, "", "</details>"]


def _quantity(row: Row) -> str:
    """With as many more decimals as it needs where a target that is not met would look met."""
    shown = _with_unit(row.measured, row)
    if row.target is not None and row.is_met is False and shown == _with_unit(row.target.value, row):
        factor = 100 if row.unit == "share" else 1
        decimals = len(_number(factor * row.target.value).partition(".")[2])
        while row.target.is_met_by(round(factor * row.measured, decimals) / factor):
            decimals += 1
        return _with_unit(row.measured, row, decimals)
    return shown


def _with_unit(value: float, row: Row, decimals: int | None = None) -> str:
    number = 100 * value if row.unit == "share" else value
    written = _number(number) if decimals is None else f"{number:,.{decimals}f}"
    return f"{written} {'%' if row.unit == 'share' else row.unit}".strip()


def _target(row: Row) -> str:
    if row.target is None:
        return ""
    sign = "≥" if row.target.at == "least" else "≤"
    aim = f", aim {_with_unit(row.target.aim, row)}" if row.target.aim is not None else ""
    return f"{sign} {_with_unit(row.target.value, row)}{aim}"


def _spread(row: Row) -> str:
    if len(row.rounds) == 1:
        return "one round"
    factor = 100 if row.unit == "share" else 1
    return f"{_number(factor * min(row.rounds))} to {_number(factor * max(row.rounds))}"


def _number(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
