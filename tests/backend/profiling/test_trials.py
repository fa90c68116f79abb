"""Verdicts on changes, from the ratios of several rounds."""

from __future__ import annotations

import pytest

from backend.profiling.changes import USUAL_CHANGES, changes
from backend.profiling.trials import judged


@pytest.mark.parametrize(
    ("speeds", "ttfts", "verdict"),
    [
        ([1.5, 1.4, 1.6], [0.9, 1.0, 1.0], "recommended"),
        ([1.0, 1.0, 1.0], [0.3, 0.2, 0.3], "recommended"),
        ([1.5, 1.4, 1.6], [1.5, 1.6, 1.5], "a trade-off"),
        ([0.8, 0.8, 0.9], [0.5, 0.5, 0.5], "a trade-off"),
        ([1.01, 1.02, 1.03], [1.0, 1.0, 1.0], "no gain"),
        ([1.5, 0.9, 1.4], [1.0, 1.0, 1.0], "no gain"),
        ([0.8, 0.7, 0.9], [1.0, 1.0, 1.0], "worse"),
        ([1.0, 1.0, 1.0], [1.2, 1.3, 1.2], "worse"),
    ],
)
def test_a_change_is_recommended_if_each_round_says_so(speeds: list[float], ttfts: list[float], verdict: str) -> None:
    """By five per cent at least, and in each round; one that helps one figure and hurts the other is a trade-off."""
    found, reason = judged(speeds, ttfts)
    assert found == verdict
    assert reason.startswith(f"tokens/s {sorted(speeds)[1]:.2f} x")


def test_changes_are_named_by_commas() -> None:
    """Each once, in the order in which they are named; all is the usual ones."""
    assert changes("batch, int8,batch") == ("batch", "int8")
    assert changes("all") == USUAL_CHANGES
