"""The command `keepgate simulate`."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gateway.commands.simulation.command import main
from gateway.commands.simulation.figures import Figures
from tests.gateway.commands.simulation.traces import write_mooncake

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(write_mooncake(tmp_path / "trace.jsonl"))


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_prints_what_is_busy_and_what_limits(trace: str) -> None:
    """As one of keepgate's commands: layers, loads, times, and the bottleneck by name."""
    words = ["simulate", "--trace", trace, "--repeats", "0.5", "--plan", "10,1000"]
    text = subprocess.run([sys.executable, "-m", "gateway", *words], capture_output=True, text=True, check=True).stdout
    for name in ("a gateway's memory", "Redis nodes", "to the first byte", "The bottleneck are backends"):
        assert name in text
    assert re.search(r"requests/s +10 +1,000\n", text)


def test_it_prints_json(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the figures that were used, and what a plan needs."""
    about = told(capsys, "--trace", trace, "--set", "token=0.01", "--plan", "100")
    assert about["figures"]["token"] == 0.01
    assert about["result"]["layers"]["miss"] == 1.0
    assert about["result"]["bottleneck"] == "backend"
    assert about["strategy"] == "prefix-aware"
    # Of the blocks of four turns, 2 + 4 + 6 + 8, the backend that has a conversation holds 0 + 2 + 4 + 6.
    assert about["result"]["block_hits"] == pytest.approx(12 / 20, abs=0.01)
    assert about["plan"][0]["rate"] == 100
    assert about["plan"][0]["backends"] >= 1


def test_what_dies_is_told(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several nodes."""
    about = told(capsys, "--trace", trace, "--kill", "backend:0@50", "--kill", "gateway:1@60")
    assert set(about["result"]["failed"]) <= {
        *("a stream that its backend has broken off", "sent to a gateway that has died"),
        "under way in a gateway that has died",
    }
    assert sum(about["result"]["failed"].values()) > 0


def test_a_trace_without_prefixes_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    """Its arrivals and lengths count; backends are chosen by their load."""
    file = ROOT / "benchmarks" / "data" / "traces" / "azure_2023_code.csv.gz"
    about = told(capsys, "--trace", str(file), "--seconds", "60")
    assert about["strategy"] == "least-connections"
    assert about["result"]["block_hits"] == 0


def test_figures_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, and which one was given."""
    assert main(["--figures", "--set", "slots=64"]) == 0
    text = capsys.readouterr().out
    for field in fields(Figures):
        assert re.search(rf"^  {field.name} ", text, re.MULTILINE)
    assert re.search(r"slots +64 answers +given", text)


def test_measured_figures_are_those_of_the_benchmarks() -> None:
    """Within a factor of two of the medians that are recorded now, which are of whatever machine measured them last."""
    checked = 0
    for field in fields(Figures):
        found = re.fullmatch(r"(benchmarks/results/\w+\.json): (.*)", field.metadata["source"])
        if found is None:
            continue
        figure = json.loads((ROOT / found[1]).read_text(encoding="utf-8"))["figure"]
        measured = recorded(figure, found[2])
        told = f"{field.name}: {measured:.3g} is measured now; set it, and bring the tables of scaling.md up to date"
        assert 0.5 <= getattr(Figures(), field.name) / measured <= 2, told
        checked += 1
    assert checked >= 7


def recorded(figure: dict[str, Any], named: str) -> float:
    """In seconds: a row by its name, or by its name and that of a figure that was measured with it."""
    for row in figure["rows"]:
        if row["what"] == named:
            return median(row["rounds"]) * {"ms": 1e-3, "µs": 1e-6}[row["unit"]]
        beside = named.removeprefix(f"{row['what']}: ")
        if beside != named and row["beside"]:
            assert "µs" in beside
            return median([measured[beside] for measured in row["beside"]]) * 1e-6
    raise AssertionError(f"no row is {named}")


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gateways", "0"], "'0' is not a number of at least 1"),
        (["--rate", "nan"], "'nan' is not a number more than 0"),
        (["--repeats", "1.5"], "'1.5' is not a share from 0 to 1"),
        (["--kill", "redis:0"], "'redis:0' is not gateway:N@S"),
        (["--kill", "redis:7@1"], "there is no redis 7: there are 1, from 0 on"),
        (["--plan", "10,no"], "'no' is not a number more than 0"),
        (["--set", "tokens=1"], "'tokens=1': expected NAME=NUMBER with a name of gateway_hit"),
        (["--set", "token=fast"], "'token=fast': expected a number of 0 or more for token"),
        (["--set", "slots=0"], "'slots=0': expected a number more than 0 for slots"),
        (["--strategy", "best"], "invalid choice: 'best'"),
    ],
)
def test_a_wrong_option_is_named(
    words: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with the way to the list of options."""
    with pytest.raises(SystemExit) as ended:
        main(["--trace", trace, *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_a_trace_is_needed_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that is not named, is not there, or has no requests."""
    with pytest.raises(SystemExit):
        main([])
    assert "--trace" in capsys.readouterr().err
    assert main(["--trace", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
