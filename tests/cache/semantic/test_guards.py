"""What the guards refuse and what they let pass."""

import csv

import pytest

from cache.semantic.guards import GUARDS, refusal
from cache.semantic.language.text import Text
from tests.cache.semantic.trap_pairs import DATA, Pair, trap_pairs

PAIRS = trap_pairs()
BY_NAME = dict(GUARDS)


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if pair.guard], ids=lambda pair: f"{pair.asked} | {pair.cached}"
)
def test_a_trap_is_refused_by_the_guard_that_watches_for_it(pair: Pair) -> None:
    """The named guard refuses by itself, whatever the others say, and so does the whole."""
    asked, cached = Text.of(pair.asked), Text.of(pair.cached)
    assert BY_NAME[pair.guard](asked, cached)
    assert refusal(asked, cached) is not None


@pytest.mark.parametrize(
    "pair", [pair for pair in PAIRS if not pair.guard], ids=lambda pair: f"{pair.asked} | {pair.cached}"
)
def test_an_honest_paraphrase_passes(pair: Pair) -> None:
    """No guard refuses a prompt that asks the same in other words."""
    assert refusal(Text.of(pair.asked), Text.of(pair.cached)) is None


def test_the_table_is_as_long_and_as_balanced_as_it_claims() -> None:
    """At least 300 pairs over 20 kinds, half of which pass, and every guard has traps of its own."""
    passing = sum(not pair.guard for pair in PAIRS)
    assert len(PAIRS) >= 300
    assert len({pair.kind for pair in PAIRS}) >= 20
    assert 0.45 <= passing / len(PAIRS) <= 0.55
    assert {pair.guard for pair in PAIRS if pair.guard} == set(BY_NAME) - {"length"}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.asked} | {pair.cached}")
def test_every_guard_is_symmetric_and_accepts_a_text_for_itself(pair: Pair) -> None:
    """Which of two prompts came first says nothing, and no guard refuses a prompt against itself."""
    asked, cached = Text.of(pair.asked), Text.of(pair.cached)
    for name, refuses in GUARDS:
        assert refuses(asked, cached) == refuses(cached, asked), name
        assert not refuses(asked, asked), name
        assert not refuses(cached, cached), name


def test_no_finance_trap_passes() -> None:
    """Of the 32 published pairs that differ in polarity, number, entity or time, each is refused."""
    with (DATA / "finance_adversarial_pairs.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 32
    passed = [
        (row["seed"], row["probe"])
        for row in rows
        if row["should_hit"] == "0" and refusal(Text.of(row["seed"]), Text.of(row["probe"])) is None
    ]
    assert passed == []


def test_a_text_longer_than_an_embedding_sees_must_be_the_same_to_the_last_word() -> None:
    """What lies behind the embedding's cut cannot be told by similarity."""
    story = "tell me about the long road " * 30
    assert refusal(Text.of(story + "slowly"), Text.of(story + "gently")) == "length"
    assert refusal(Text.of(story + "slowly"), Text.of(story + "slowly")) is None
