"""The coefficients of the default judge. Written by `python -m benchmarks.semantic.fit_judge --write`."""

from typing import Final

INTERCEPT: Final = -12.796
COEFFICIENTS: Final = {
    "cosine": 13.005,
    "cosine of sentences": 1.185,
    "shared words": 3.064,
    "words of the shorter": 1.121,
    "shared numbers": 1.636,
    "numbers of one": -0.175,
    "a copy": -8.354,
}
SAME_ABOVE: Final = 1.254
"""Limit of the log odds: so many different answers on one subject are called the same as may be."""
DISAGREEMENT: Final = -2.292
DISAGREEMENT_OF_SCORE: Final = -0.570
"""Of two answers to one question: the log likelihood ratio that they disagree, by their score."""
