"""The coefficients of the default judge. Written by `python -m benchmarks.semantic.fit_judge --write`."""

from typing import Final

INTERCEPT: Final = -12.396
COEFFICIENTS: Final = {
    "cosine": 13.846,
    "shared words": 2.611,
    "shared numbers": 1.640,
    "difference in negations": -1.288,
    "a copy": -6.082,
}
SAME_ABOVE: Final = 1.273
"""Limit of the log odds: so many different answers on one subject are called the same as may be."""
DISAGREEMENT: Final = -2.194
DISAGREEMENT_OF_SCORE: Final = -0.566
"""Of two answers to one question: the log likelihood ratio that they disagree, by their score."""
