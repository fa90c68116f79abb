"""The coefficients of the default judge. Written by `python -m benchmarks.fit_semantic_judge --write`."""

from typing import Final

from cache.semantic.policy.posterior import JudgeError

INTERCEPT: Final = -4.510
COEFFICIENTS: Final = (
    5.231,  # cosine
    1.403,  # shared words
    1.656,  # shared facts
    -2.453,  # nearer the question
    -2.673,  # other facts
    -2.311,  # other facts in a sentence
    -2.159,  # a copy but for facts
    -0.255,  # other polarity
    -1.803,  # other polarity of a sentence
    -0.133,  # other negators
    -1.200,  # a copy but for negators
    -1.523,  # other negation of a sentence
    -6.766,  # yes and no
    -0.390,  # yes and not
    -0.772,  # other names
    -1.040,  # other code
    -0.293,  # other labels
    -7.383,  # a copy with other words
    -3.919,  # a copy with other little words
    -6.414,  # a copy with moved words
)
SAME_ABOVE: Final = 0.961
DIFFERENT_BELOW: Final = -4.998
"""Limits of the log odds."""
ERROR: Final = JudgeError(recall=0.98, false_same=0.01)
"""What is promised; benchmarks/semantic_judge.py measures it on answers that were not fitted to."""
