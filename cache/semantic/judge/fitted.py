"""The coefficients of the default judge. Written by `python -m benchmarks.semantic.fit_judge --write`."""

from typing import Final

INTERCEPT: Final = -14.111
COEFFICIENTS: Final = {
    "cosine": 14.826,
    "shared words": 3.206,
    "shared numbers": 1.781,
    "a copy": -6.997,
}
SAME_ABOVE: Final = 0.910
"""Limit of the log odds: so many different answers on one subject are called the same as may be."""
DISAGREEMENT: Final = -2.643
DISAGREEMENT_OF_SCORE: Final = -0.572
"""Of two answers to one question: the log likelihood ratio that they disagree, by their score."""
