"""Labelled pairs of prompts: traps, and any file that is named."""

import asyncio
import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import ROOT, CannotMeasure
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.model_files import models_folder
from cache.semantic.evaluation.pairs import Report, report_on_pairs
from cache.semantic.evaluation.rows import LabelledPair, UnreadableFile, read_rows
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text
from tests.cache.semantic.trap_pairs import trap_pairs

PAIRS = "KEEPGATE_BENCH_PAIRS"
_TRAPS = ROOT / "tests" / "data" / "semantic" / "finance_adversarial_pairs.csv"
_DELTAS = (0.01, 0.005)
_SHOWN = "0.95"
_METHOD = f"""\
What `keepgate eval-pairs` says of each file. Traps are pairs of questions that differ in one thing that matters: about
money (Ramnarayan, MIT licence), and the hand-made ones of `tests/data/semantic/trap_pairs.txt`; "served at any
threshold" are those that no veto forbids, which a policy may then serve or not. Other files are those named in {PAIRS},
separated by `{os.pathsep}`; their columns are text_a, text_b and label. Those of the last run are not in the project:
medical.csv is Curai's medical question pairs, quora.csv 6,000 of Quora's question pairs, word_swaps.csv PAWS of Quora's
pairs."""
# By the file's name and the figure, of the policy with its vetoes and the first delta.
_TARGETS = {
    ("medical.csv", "recall"): Target("least", 0.20),
    ("medical.csv", "wrong_share_of_hits"): Target("most", 0.025),
    ("quora.csv", "wrong_share_of_hits"): Target("most", 0.12),
    ("word_swaps.csv", "negatives_served"): Target("most", 0.02),
}


async def measure(quick: bool) -> Figure:
    return await asyncio.to_thread(_measure, [] if quick else files_of(os.environ.get(PAIRS, "")))


def files_of(named: str) -> list[Path]:
    """The files that the variable names."""
    return [Path(name) for name in named.split(os.pathsep) if name]


def pairs_of(file: Path) -> list[LabelledPair]:
    """The rows of a file. Raises CannotMeasure, also for a stream."""
    try:
        pairs, _ = read_rows(file)
    except UnreadableFile as error:
        raise CannotMeasure(f"{PAIRS}: {error}") from error
    if not pairs:
        stream = "has a stream of questions; it must have the columns text_a, text_b, label"
        raise CannotMeasure(f"{PAIRS}: {file}: {stream}")
    return pairs


def _measure(files: Sequence[Path]) -> Figure:
    encoder = load_encoder("default", models_folder())

    def report(pairs: Sequence[LabelledPair], delta: float) -> Report:
        return report_on_pairs(pairs, encoder, lambda done: None, delta)

    rows = [*_trap_rows(report(traps(), _DELTAS[0])), _hand_made()]
    for file in files:
        pairs = pairs_of(file)
        for delta in _DELTAS:
            found = report(pairs, delta)
            rows += _rows(file.name, f"policy, delta {delta}", found["policy"], _TARGETS if delta == _DELTAS[0] else {})
        rows += _rows(file.name, f"similarity {_SHOWN}", found["static"][_SHOWN], {})
    return Figure(figure="semantic_pairs", title="Pairs of questions", method=_METHOD, rows=tuple(rows))


def traps() -> list[LabelledPair]:
    with _TRAPS.open(encoding="utf-8", newline="") as file:
        return [LabelledPair(row["seed"], row["probe"], row["should_hit"] == "1") for row in csv.DictReader(file)]


def _trap_rows(report: Report) -> list[Row]:
    allowed = report["negatives"] - sum(veto["negatives"] for veto in report["vetoes"].values())
    without_vetoes = report["static"][_SHOWN]["vetoes_off"]["wrong_hits"]
    return [
        Row(
            what=f"{report['negatives']} finance traps served, at any threshold",
            unit="pairs",
            rounds=(float(allowed),),
            target=Target("most", 0.0),
            beside=({f"without vetoes, at {_SHOWN}": float(without_vetoes)},),
        )
    ]


def _hand_made() -> Row:
    pairs = [pair for pair in trap_pairs() if pair.is_trap]
    allowed = sum(not compare(Text.of(pair.asked), [Text.of(pair.cached)]).veto for pair in pairs)
    return Row(
        what=f"{len(pairs)} hand-made traps served, at any threshold",
        unit="pairs",
        rounds=(float(allowed),),
        target=Target("most", 10.0),
    )


def _rows(
    file: str, policy: str, figures: dict[str, dict[str, Any]], targets: Mapping[tuple[str, str], Target]
) -> list[Row]:
    return [
        Row(
            what=f"{file}, {policy}, {vetoes}: {what}",
            unit="share",
            rounds=(float(share),),
            target=targets.get((file, what)) if vetoes == "vetoes_on" else None,
        )
        for vetoes in ("vetoes_on", "vetoes_off")
        for what in ("recall", "wrong_share_of_hits", "negatives_served")
        if (share := figures[vetoes][what]) is not None  # the share of nothing
    ]
