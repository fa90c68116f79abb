"""The command `keepgate eval-pairs`, with a small model on the real runtime."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cache.semantic.embedding.load import load_encoder
from tests.cache.semantic.embedding import models

KEEPGATE = Path(sys.executable).with_name("keepgate")
COLUMNS = ("text_a", "text_b", "label")
QUESTIONS = ("How do I activate my card", "Where is the nearest office", "What does a transfer abroad cost")


class Command:
    """The command with a model of its own and a folder for what it exports."""

    def __init__(self, folder: Path) -> None:
        self.model = models.write_bert(folder / "model", "mean")
        self._exported = folder / "exported"
        # Half a minute of work, done once.
        load_encoder(str(self.model), self._exported / "keepgate" / "embedding")

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(self._exported), "COLUMNS": "120"}
        command = [str(KEEPGATE), "eval-pairs", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)


@pytest.fixture(scope="module")
def eval_pairs(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("eval"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 pairs of one prompt with another end, 60 of one polarity with the other, and an empty text."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.csv"
    rows = [(f"{question} {n}", f"{question} {n}?", 1) for n in range(40) for question in QUESTIONS]
    rows += [(f"enable the alarm {n}", f"disable the alarm {n}", 0) for n in range(60)]
    with path.open("w", encoding="utf-8", newline="") as opened:
        csv.writer(opened).writerows([COLUMNS, *rows, ("", "", 1)])
    return path


def report(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


def test_figures_of_policy_and_thresholds_with_and_without_vetoes(eval_pairs: Command, file: Path) -> None:
    """The report has figures of the policy and of fixed thresholds, each with and without vetoes."""
    figures = report(eval_pairs(str(file), "--json", "--delta", "0.02", "--model", str(eval_pairs.model)))
    assert (figures["file"], figures["pairs"], figures["positives"], figures["negatives"]) == (str(file), 181, 121, 60)
    assert figures["delta"] == 0.02
    assert figures["notes"] == []
    assert figures["vetoes"]["words"] == {"positives": 0, "negatives": 60}
    for row in (figures["policy"], *figures["static"].values()):
        for vetoes in ("vetoes_on", "vetoes_off"):
            assert {"recall", "wrong_share_of_hits", "negatives_served"} <= row[vetoes].keys()
        assert row["vetoes_on"]["negatives_served"] == 0.0
        assert row["vetoes_off"]["recall"] <= 120 / 121
    assert figures["static"]["0.70"]["vetoes_on"]["recall"] == pytest.approx(120 / 121)
    assert figures["static"]["0.70"]["vetoes_off"]["wrong_share_of_hits"] > 0.0
    assert figures["policy"]["vetoes_on"]["recall"] > 0.5
    assert list(figures["static"]) == sorted(figures["static"])
    assert {"0.70", "0.80", "0.90", "0.95", "0.98"} <= figures["static"].keys()


def test_without_json_a_table_names_its_columns(eval_pairs: Command, file: Path) -> None:
    """The table that is printed without --json names its columns and is at most 160 characters wide."""
    done = eval_pairs(str(file), "--model", str(eval_pairs.model))
    assert done.returncode == 0
    for words in (
        "181 pairs, 121 positive and 60 negative",
        "policy ",
        ">= 0.95",
        "neg.served  share of",
        "words 0, 60",
    ):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 160


def test_pairs_of_one_class_have_no_figures_of_the_other(eval_pairs: Command, tmp_path: Path) -> None:
    """Pairs of one class alone have null figures for the other, and notes say why."""
    path = tmp_path / "traps.csv"
    path.write_text("text_a,text_b,label\nbuy it,sell it,0\nHow far is Rome?,How far is Oslo?,0\n", encoding="utf-8")
    figures = report(eval_pairs(str(path), "--json", "--model", str(eval_pairs.model)))
    assert figures["policy"]["vetoes_on"] == {
        "recall": None,
        "wrong_share_of_hits": 0.0,
        "negatives_served": 0.0,
        "wrong_per_request": 0.0,
        "hits": 0,
        "wrong_hits": 0,
    }
    assert "All pairs are negative" in figures["notes"][0]
    assert "serves nothing before it has learned from" in figures["notes"][1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.csv",), "none.csv: cannot be read: No such file or directory"),
        (("none.csv", "--delta", "1"), "'1' is no share"),
        (("none.csv", "--delta", "a"), "'a' is no share"),
        (("none.csv", "--delta", "nan"), "'nan' is no share"),
        ((), "FILE"),
        (("none.csv", "--judge-recall", "2"), "'2' is no share"),
        (("none.csv", "--treshold", "1"), "unrecognized arguments: --treshold"),
    ],
)
def test_a_wrong_argument_is_refused_in_one_line(eval_pairs: Command, words: tuple[str, ...], message: str) -> None:
    """A wrong argument ends the command with status 2 and one line on stderr."""
    done = eval_pairs(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("keepgate eval-pairs: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_missing_model_is_named(eval_pairs: Command, file: Path) -> None:
    """A missing model ends the command with status 1 and a line that names it."""
    done = eval_pairs(str(file), "--model", "no/such-model")
    assert done.returncode == 1
    assert "no/such-model" in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hundred questions with three answers, two of them asked twice."""
    path = tmp_path_factory.mktemp("stream") / "log.jsonl"
    words = ("please", "now", "today", "quickly", "again", "there", "first", "then")
    asked = [
        {"question": f"{question} {one} {other}", "answer_id": number, "lang": "en"}
        for one in words
        for other in words
        for number, question in enumerate(QUESTIONS)
    ]
    path.write_text("\n".join(map(json.dumps, [*asked, *asked[:2]])), encoding="utf-8")
    return path


def test_a_stream_is_asked_in_its_order(eval_pairs: Command, stream: Path) -> None:
    """The report has the hits, the wrong ones and the bound by checkpoints."""
    figures = report(eval_pairs(str(stream), "--json", "--delta", "0.05", "--model", str(eval_pairs.model)))
    assert (figures["requests"], figures["repeats"], figures["asked"], figures["answers"]) == (194, 2, 192, 3)
    assert figures["delta"] == 0.05
    assert figures["judge"] == {"recall": 0.98, "false_same": 0.01}
    assert [point["asked"] for point in figures["checkpoints"]][-1] == 192
    assert {"latest_hits", "hits", "wrong", "audits", "bound"} <= figures["checkpoints"][0].keys()
    assert figures["languages"].keys() == {"en"}


def test_the_table_of_a_stream_is_the_same_each_time(eval_pairs: Command, stream: Path) -> None:
    """Audits and the judge's errors are drawn in the same way, with the errors that are asked for."""
    words = ("--judge-recall", "0.9", "--judge-false-same", "0")
    (table,) = {eval_pairs(str(stream), *words, "--model", str(eval_pairs.model)).stdout for _ in range(2)}
    for expected in ("194 requests", "recall 0.9 and false same 0", "bound"):
        assert expected in table


def test_a_judge_that_tells_nothing_apart_is_refused(eval_pairs: Command, stream: Path) -> None:
    """Before anything is computed."""
    done = eval_pairs(str(stream), "--judge-recall", "0.01")
    assert done.returncode == 2
    assert "--judge-recall must be above --judge-false-same, and 0.01 is not above 0.01" in done.stderr


def test_a_bad_row_of_a_stream_is_named(eval_pairs: Command, tmp_path: Path) -> None:
    """With file, line and column."""
    path = tmp_path / "log.csv"
    path.write_text("question,answer_id\nWho?,1\n,2\n", encoding="utf-8")
    done = eval_pairs(str(path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"keepgate eval-pairs: {path}, line 3: column question is empty")
