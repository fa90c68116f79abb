"""The command `keepgate route`."""

import json
from pathlib import Path

import pytest

from gateway.commands.route import coarse, main, simulated
from gateway.settings.upstreams import RoutingSettings
from prefix_store.replay.read import read_trace

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "data" / "traces"
CONVERSATION = TRACES / "mooncake_conversation.jsonl.gz"


def test_prefix_aware_finds_what_one_pool_would_and_loads_none_too_much() -> None:
    """On the Mooncake trace: 28 % of the blocks where turns find 12.2 %, no upstream above 1.3 means."""
    trace = read_trace(CONVERSATION)
    routing = RoutingSettings(prefix_blocks=20_000)
    turns, aware = (simulated(trace, name, routing, 4, 20_000) for name in ("round-robin", "prefix-aware"))
    assert turns.block_hits == pytest.approx(0.122, abs=0.001)
    assert aware.block_hits >= 0.28
    assert max(aware.requests, aware.computed) <= 1.3
    assert aware.first_token[1] < turns.first_token[1]


def test_a_history_that_remembers_more_than_upstreams_hold_costs_little() -> None:
    """Nobody knows the exact size of an upstream's cache; four times as much is as good to a point."""
    trace = read_trace(CONVERSATION)
    aware = simulated(trace, "prefix-aware", RoutingSettings(prefix_blocks=80_000), 4, 20_000)
    assert aware.block_hits >= 0.28
    assert max(aware.requests, aware.computed) <= 1.3


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two conversations of four turns, in blocks of 64 tokens."""
    turns = [{"t": float(turn), "in": 1024 * (turn + 1), "out": 10, "keep": 16 * turn} for turn in range(4)]
    lines = [
        json.dumps(
            {"block_size": 64, "requests": [{**turn, "new": [[16 * number, 16]]} for number, turn in enumerate(turns)]}
        )
        for _ in range(2)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_short_blocks_are_put_together(small: Path) -> None:
    """A block of 512 tokens has the number of its last one of 64."""
    first = next(coarse(read_trace(small)).requests())
    assert list(first.keys) == [7, 15]


def test_it_prints_a_table(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each strategy that was asked for."""
    words = ["--trace", str(small), "--upstreams", "2", "--blocks", "100"]
    assert main([*words, "--strategy", "round-robin", "--strategy", "prefix-aware"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["round-robin", "prefix-aware"]


def test_it_prints_json(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each conversation's earlier turns are found where it stays: 2 + 4 + 6 of 2 + 4 + 6 + 8 blocks."""
    assert main(["--trace", str(small), "--upstreams", "2", "--strategy", "prefix-aware", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prefix-aware"]["block_hits"] == pytest.approx(12 / 20)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--upstreams", "0"], "'0' is not a number of at least 1"),
        (["--rate", "nan"], "'nan' is not a number more than 0"),
        (["--load-bound", "0.5"], "'0.5' is not a number from 1 to 10"),
        (["--strategy", "best"], "invalid choice: 'best'"),
    ],
)
def test_a_wrong_option_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line, with the way to the list of options."""
    with pytest.raises(SystemExit) as ended:
        main(["--trace", "x", "--upstreams", "4", *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_cannot_be_used_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there, and one that does not say what prompts share."""
    assert main(["--trace", str(tmp_path / "none"), "--upstreams", "4"]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["--trace", str(TRACES / "azure_2023_code.csv.gz"), "--upstreams", "4"]) == 2
    assert "does not say what prompts share" in capsys.readouterr().err
