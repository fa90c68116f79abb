"""What the guards cost and what they stop among real neighbours: the nearest question by embedding, right or wrong."""

import csv
from collections import Counter

import pytest

from cache.semantic.guards import refusal
from cache.semantic.language.text import Text
from tests.cache.semantic.trap_pairs import DATA


def verdicts(dataset: str) -> Counter[tuple[bool, bool]]:
    """(of one intent, let pass) -> pairs of `dataset` in intent_neighbors.csv."""
    counts: Counter[tuple[bool, bool]] = Counter()
    with (DATA / "intent_neighbors.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["dataset"] == dataset:
                refused = refusal(Text.of(row["asked"]), Text.of(row["cached"]))
                counts[row["same_intent"] == "1", refused is None] += 1
    return counts


@pytest.mark.parametrize(("dataset", "passing", "stopped"), [("banking77", 0.35, 0.75), ("clinc150", 0.36, 0.78)])
def test_guards_pass_same_intents_and_refuse_different_ones(dataset: str, passing: float, stopped: float) -> None:
    """Guards pass at least `passing` of the neighbours with one intent, and refuse at least `stopped` of the others.

    No stricter floor makes sense for the second: the data set gives "Why was my top-up rejected?" and "My top up was
    rejected. Why?" two intents.
    """
    counts = verdicts(dataset)
    same = counts[True, True] + counts[True, False]
    different = counts[False, True] + counts[False, False]
    assert same >= 100
    assert different >= 30
    assert counts[True, True] / same >= passing
    assert counts[False, False] / different >= stopped
