"""The command as a process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KEEPGATE = [str(Path(sys.executable).with_name("keepgate")), "replay"]
MODULE = [sys.executable, "-m", "prefix_store.replay"]
TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "traces"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two alternating chats with a common prompt, which grow by a block each time."""
    lines = []
    for turn in range(40):
        chat = turn % 2
        keys = [0, *(1_000 * (chat + 1) + block for block in range(turn // 2 + 1))]
        lines.append({"timestamp": turn, "input_length": 512 * len(keys), "output_length": 9, "hash_ids": keys})
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("command", [KEEPGATE, MODULE], ids=["keepgate", "module"])
def test_json_has_the_endless_cache_and_each_capacity(command: list[str], trace: Path) -> None:
    """With unlimited capacity a turn finds all but its newest block; with less it finds fewer."""
    done = run(*command, trace, "--capacity", "50,10", "--engines", "2", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    blocks = 2 * sum(turn + 2 for turn in range(20))
    assert report["infinite"]["block_hit_ratio"] == pytest.approx((blocks - 41) / blocks)
    assert report["50"]["block_hit_ratio"] == report["infinite"]["block_hit_ratio"]
    assert report["50"]["token_hit_ratio"] == report["infinite"]["token_hit_ratio"]
    assert report["10"]["policies"]["lru"]["block_hit_ratio"] < report["50"]["block_hit_ratio"]
    assert set(report["10"]["policies"]) == {"hazard", "lru", "belady"}
    assert report["10"]["routing"]["engines"] == 2
    assert report["advice"]["capacity"] <= 41


def test_without_json_there_are_tables(trace: Path) -> None:
    """The tables name the policies and the recommended capacity."""
    done = run(*KEEPGATE, trace, "--capacity", "10")
    assert done.returncode == 0, done.stderr
    for word in ("hazard", "belady", "by prefix", "of what room for everything would", "40 requests"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_an_azure_trace_says_what_it_cannot_tell() -> None:
    """There is no hit ratio; it says how long a block would stay."""
    done = run(*KEEPGATE, TRACES / "azure_2023_code.csv.gz", "--capacity", "5000")
    assert done.returncode == 0, done.stderr
    assert "nothing can be told of hits" in done.stdout
    report = json.loads(run(*KEEPGATE, TRACES / "azure_2023_code.csv.gz", "--capacity", "5000", "--json").stdout)
    assert report["infinite"] == {"block_hit_ratio": None, "token_hit_ratio": None}
    assert report["5000"]["block_hit_ratio"] is None
    assert report["5000"]["seconds_kept"] == pytest.approx(15.2, abs=0.1)


def test_a_bad_trace_is_refused_with_a_line_for_each_fault(trace: Path) -> None:
    """A trace with errors is not replayed."""
    lines = trace.read_text().splitlines()
    lines[4], lines[8] = '{"timestamp": 1}', "no"
    trace.write_text("\n".join(lines))
    done = run(*KEEPGATE, trace, "--capacity", "10", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    faults = done.stderr.splitlines()
    assert [fault.split(": ")[1] for fault in faults] == [f"{trace} line 5", f"{trace} line 9"]
    assert all(fault.startswith("keepgate replay: ") for fault in faults)


@pytest.mark.parametrize(
    "words",
    [["--capacity", "0"], ["--capacity", "5,x"], ["--engines", "-1"], ["--block-tokens", ""], ["--capacty", "5"]],
)
def test_a_wrong_argument_is_said_in_one_line(words: list[str], trace: Path) -> None:
    """The line names the option."""
    done = run(*KEEPGATE, trace, *words)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("keepgate replay: ")
    assert words[0] in line
