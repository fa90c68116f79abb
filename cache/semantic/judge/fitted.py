"""The coefficients of the default judge. Written by `python -m benchmarks.semantic.fit_judge --write`."""

from typing import Final

from cache.semantic.policy.posterior import JudgeError

INTERCEPT: Final = -4.513
COEFFICIENTS: Final = (
    5.207,  # cosine
    1.435,  # shared words
    1.651,  # shared facts
    -2.452,  # nearer the question
    -2.650,  # other facts
    -2.591,  # other facts in a sentence
    -2.112,  # a copy but for facts
    -0.256,  # other polarity
    -1.801,  # other polarity of a sentence
    -0.129,  # other negators
    -1.231,  # a copy but for negators
    -1.498,  # other negation of a sentence
    -6.758,  # yes and no
    -0.388,  # yes and not
    -0.783,  # other names
    -1.047,  # other code
    -0.302,  # other labels
    -7.381,  # a copy with other words
    -3.926,  # a copy with other little words
    -6.206,  # a copy with moved words
)
SAME_ABOVE: Final = 2.604
DIFFERENT_BELOW: Final = -5.016
"""Limits of the log odds."""
ERROR: Final = JudgeError(recall=1.0, false_same=0.01)
"""Of SAME against everything else. To call it better at same answers than it is keeps the budget, to call it worse does
not: an upstream that words an answer always alike is never misjudged.
"""
