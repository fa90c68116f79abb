"""Greedy answers are the same with every method on every runner; `sameness.py` alone asks a thousand."""

from __future__ import annotations

from tests.backend.speculation.sameness import METHODS, RUNNERS, outcomes


def test_greedy_answers_are_the_same() -> None:
    """Of sixty random prompts, in batches of eight, and each method has its part in it."""
    found = outcomes(60, seed=7)
    assert [outcome for outcome in found if outcome.same < outcome.answers] == []
    assert len(found) == len(METHODS) * len(RUNNERS)
    assert {outcome.method for outcome in found if outcome.accepted} == set(METHODS)
