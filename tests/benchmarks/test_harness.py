"""The benchmarks run end to end, and their report says exactly what was measured."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from benchmarks.harness.measurement import (
    FIGURES,
    OPTIONAL_FIGURES,
    RATIO,
    RESULTS,
    CannotReport,
    Figure,
    Measurement,
    Row,
    Target,
    load,
    save,
)
from benchmarks.harness.processes import ROOT
from benchmarks.harness.regression import regressions
from benchmarks.harness.report import CHARTS, HEADLINES, REPORT, render


def measurement(figure: str, *rows: Row, **fields: Any) -> Measurement:
    row = Row(what="hits", unit="x", rounds=(1.5, 0.5, 0.9), target=Target("least", 0.8))
    known: dict[str, Any] = {
        "figure": Figure(figure=figure, title=f"The {figure}", method="By hand.", rows=rows or (row,)),
        "date": "2026-01-02",
        "commit": "0123456789ab",
        "quick": False,
        "seconds": 3.0,
        "machine": {"cpu": "an abacus"},
        "versions": {"python": "3.11"},
    }
    return Measurement(**known | fields)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A folder with a measurement of every figure."""
    for figure in FIGURES:
        save(measurement(figure), tmp_path)
    return tmp_path


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def edit(file: Path, **fields: Any) -> None:
    content = msgspec.json.decode(file.read_bytes())
    content["figure"]["rows"][0].update(fields)
    file.write_bytes(msgspec.json.encode(content))


# The harness


def test_a_quick_run_measures_a_real_gateway_and_saves_nothing() -> None:
    """A quick run measures a real gateway, prints every row, and changes no file of the repository."""
    folders = (ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks")
    before = {file: file.read_bytes() for folder in folders for file in folder.iterdir()}
    done = run("--quick", "relay_cpu", "frozen_redis")

    assert done.returncode == 0, done.stderr
    assert "chunks one by one: " in done.stdout
    assert "failed requests: 0 requests" in done.stdout
    assert "recovery after SIGCONT: " in done.stdout
    assert {file: file.read_bytes() for folder in folders for file in folder.iterdir()} == before


def test_a_missing_load_generator_is_named(tmp_path: Path) -> None:
    """A missing load generator is named with the command that installs it."""
    git = shutil.which("git")
    assert git is not None
    (tmp_path / "git").symlink_to(git)
    done = run("--quick", "exact_hits", PATH=str(tmp_path))

    assert done.returncode == 1
    assert "wrk is not installed" in done.stderr
    assert "apt-get install wrk" in done.stderr


def test_an_unknown_figure_is_refused() -> None:
    """An unknown figure is refused before anything is measured."""
    done = run("--quick", "beauty")

    assert done.returncode == 2
    assert "beauty" in done.stderr


# The gate


def decode(*rows: Row) -> Figure:
    return Figure(figure="decode", title="Decode", method="By hand.", rows=rows)


def ratio(*rounds: float, at: Literal["least", "most"] = "least", what: str = "batch 1") -> Row:
    return Row(what=what, unit=RATIO, rounds=rounds, target=Target(at, 1.0))


def test_a_ratio_that_is_lower_in_every_round_is_a_regression() -> None:
    """A ratio that is lower in every round is a regression, named with its old and new value."""
    (line,) = regressions(decode(ratio(2.0, 3.0, 2.5)), decode(ratio(1.0, 1.9, 1.5)))

    assert line == "decode, batch 1: 1.9 at best, 2 at worst before"


def test_a_ratio_with_an_upper_target_is_worse_when_it_grows() -> None:
    """A ratio with an upper target is worse if its smallest round exceeds the largest one of before."""
    assert regressions(decode(ratio(0.5, 0.6, at="most")), decode(ratio(0.61, 0.9, at="most")))
    assert not regressions(decode(ratio(0.5, 0.6, at="most")), decode(ratio(0.59, 0.9, at="most")))


def test_rounds_that_overlap_are_no_regression() -> None:
    """Overlapping rounds, rows that are no ratios and rows without a target are no regression."""
    saved = decode(
        ratio(2.0, 3.0),
        Row(what="tokens", unit="tok/s", rounds=(90.0,), target=Target("least", 50.0)),
        Row(what="to compare", unit=RATIO, rounds=(2.0,)),
    )
    now = decode(
        ratio(1.0, 2.0),
        Row(what="tokens", unit="tok/s", rounds=(9.0,), target=Target("least", 50.0)),
        Row(what="to compare", unit=RATIO, rounds=(1.0,)),
    )

    assert regressions(saved, now) == []


def test_a_row_that_is_no_longer_measured_counts_as_worse() -> None:
    """A row that is no longer measured is a regression."""
    assert regressions(decode(ratio(2.0)), decode(ratio(2.0, what="batch one"))) == [
        "decode, batch 1: not measured any more"
    ]


# The report


def test_the_report_has_the_median_the_spread_and_the_verdict(results: Path) -> None:
    """The report has each row's median, spread and verdict, on the page of its subject."""
    files = render(results)
    text = "".join(files.values())

    assert text.count("| hits | ≥ 0.80 x | 0.90 x | 0.50 to 1.50 | met |") == len(FIGURES)
    assert f"{len(FIGURES)} of {len(FIGURES)} targets are met." in files["index.md"]
    assert "an abacus" in files["index.md"]
    assert "commit 0123456789ab" in files["engine.md"]


def test_the_committed_report_matches_the_committed_results() -> None:
    """The committed pages and charts are those that the committed results give, with every headline."""
    files = render(RESULTS)
    assert {file.name: file.read_text() for file in REPORT.iterdir()} == files
    assert all(f"| {line.text} |" in files["index.md"] for line in HEADLINES)
    assert {f"{chart.name}.svg" for chart in CHARTS} <= files.keys()


def test_a_missed_target_is_on_the_first_page(results: Path) -> None:
    """A missed target is on the first page and on the page of its figure."""
    row = Row(what="memory", unit="MB", rounds=(130.0, 90.0), target=Target("most", 120.0), summary="maximum")
    save(measurement("memory", row), results)
    files = render(results)

    assert "| [The memory](exact-cache.md): memory | 130 MB | ≤ 120 MB |" in files["index.md"]
    assert "| memory | ≤ 120 MB | 130 MB (maximum) | 90.0 to 130 | **not met** |" in files["exact-cache.md"]


def test_a_target_that_is_nearly_met_does_not_look_met(results: Path) -> None:
    """A figure that is missed by less than its digits show has more digits."""
    rows = (
        Row(what="recall", unit="", rounds=(0.5982,), target=Target("least", 0.6)),
        Row(what="wrong", unit="share", rounds=(0.012504,), target=Target("most", 0.0125)),
        Row(what="nearer", unit="", rounds=(0.59997,), target=Target("least", 0.6)),
        Row(what="long", unit="ms", rounds=(1000.4,), target=Target("most", 1000.0)),
        Row(what="near", unit="", rounds=(0.6018,), target=Target("least", 0.6)),
    )
    save(measurement("memory", *rows), results)
    text = render(results)["exact-cache.md"]

    assert "| recall | ≥ 0.60 | 0.598 |" in text
    assert "| wrong | ≤ 1.25 % | 1.2504 % |" in text
    assert "| nearer | ≥ 0.60 | 0.59997 |" in text
    assert "| long | ≤ 1,000 ms | 1,000.4 ms |" in text
    assert "| near | ≥ 0.60 | 0.60 |" in text


def test_one_of_two_alternative_targets_is_enough(results: Path) -> None:
    """One of two alternative targets is enough, and the other is not counted as missed."""
    slow = Row(what="tokens", unit="tok/s", rounds=(10.0,), target=Target("least", 50.0), either="batch 1")
    ratio = Row(what="ratio", unit="x", rounds=(2.5,), target=Target("least", 2.0), either="batch 1")
    save(measurement("decode", slow, ratio), results)
    files = render(results)

    assert "| tokens | ≥ 50.0 tok/s | 10.0 tok/s | one round | met by the other |" in files["engine.md"]
    assert "not met" not in files["index.md"]


@pytest.mark.parametrize("figure", FIGURES)
def test_a_report_without_a_figure_is_an_error(results: Path, figure: str) -> None:
    """A report without one of the figures is an error that names the command for it."""
    (results / f"{figure}.json").unlink()

    with pytest.raises(CannotReport, match=rf"{figure}\.json: missing; `python -m benchmarks {figure}`"):
        render(results)


def test_a_quick_run_is_no_result(results: Path) -> None:
    """The result of a quick run is refused in a report."""
    save(measurement("decode", quick=True), results)

    with pytest.raises(CannotReport, match=r"decode\.json: is of a --quick run"):
        render(results)


@pytest.mark.parametrize(
    "made_up",
    [
        {"rounds": []},
        {"measured": 3.0},
        {"rounds": ["3.0"]},
        {"target": {"at": "about", "value": 1.0}},
        {"is_met": True},
    ],
)
def test_results_with_made_up_fields_are_refused(results: Path, made_up: dict[str, Any]) -> None:
    """A result with fields that do not follow from its rounds is refused."""
    edit(results / "memory.json", **made_up)

    with pytest.raises(CannotReport, match=r"^memory\.json: "):
        render(results)


def test_a_result_under_another_name_is_refused(results: Path) -> None:
    """A result under another figure's name is refused."""
    (results / "decode.json").write_bytes((results / "memory.json").read_bytes())

    with pytest.raises(CannotReport, match="holds the figure 'memory'"):
        load("decode", results)


def test_every_committed_result_can_be_loaded() -> None:
    """Every committed result can be loaded as its figure."""
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        assert load(file.stem, file.parent).figure.figure in (*FIGURES, *OPTIONAL_FIGURES)
