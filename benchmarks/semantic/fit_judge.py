"""Fits the coefficients of the default judge to the labelled answers that are not held out.

python -m benchmarks.semantic.fit_judge          print what was found
python -m benchmarks.semantic.fit_judge --write  and write cache/semantic/judge/fitted.py
"""

import argparse
import asyncio
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.semantic.judge import open_vectors
from benchmarks.semantic.labelled_answers import DIFFERENT, SAME, Kind, Pair, is_held_out, labelled, pairs
from cache.semantic.judge.answer import Answer, facts_of
from cache.semantic.judge.comparison import FEATURES, SIGNS, Read, compared
from cache.semantic.judge.embedding_judge import EmbeddingJudge

_FITTED = Path(__file__).resolve().parents[2] / "cache" / "semantic" / "judge" / "fitted.py"

Vector = npt.NDArray[np.float64]

# There are many more pairs of some kinds than of others, and some matter more: each pair's weight.
_WEIGHTS = {Kind.FREE: 1.0, Kind.CHAT: 6.0, Kind.CONTRADICTING: 1.0, Kind.NEAR: 3.0, Kind.RELATED: 1.0, Kind.OTHER: 0.5}
# Of the different pairs of each kind, how many may be called the same; of those that say the same and are decided, how
# many different, each kind counting alike. Both lie below what is promised (.01 and .02), because groups differ more
# from each other than pairs do: a limit that just holds on some groups is broken on others.
_MAX_FALSE_SAME = 0.007
_MAX_FALSE_DIFFERENT = 0.007
_RIDGE = 3.0
_STEP_OF_LIMIT = 0.02
_STEPS = 2000


def fit(features: Vector, same: npt.NDArray[np.bool_], weights: Vector) -> tuple[float, Vector]:
    """Intercept and coefficients [features] of the likeliest logistic model whose coefficients have their signs.

    By accelerated projected gradient descent (Beck and Teboulle, SIAM J. Imaging Sci. 2(1), 2009) on features of
    mean 0 and deviation 1, with a ridge on the coefficients.
    """
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-9
    scaled = np.column_stack([np.ones(len(features)), (features - mean) / deviation])
    signs = np.array([0, *SIGNS.values()])
    side = np.where(same, 1.0, -1.0)
    # The slope of the logistic loss changes by at most a quarter of the features' largest singular value, squared.
    step = 1.0 / (0.25 * np.linalg.norm(scaled * np.sqrt(weights)[:, None], 2) ** 2 + _RIDGE)
    found = ahead = np.zeros(scaled.shape[1])
    momentum = 1.0
    for _ in range(_STEPS):
        margin = np.clip(side * (scaled @ ahead), -50, 50)
        slope = -(scaled.T @ (weights * side / (1.0 + np.exp(margin)))) + _RIDGE * np.r_[0.0, ahead[1:]]
        new = ahead - step * slope
        new = np.where(signs * new < 0, 0.0, new)
        following = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        ahead = new + (momentum - 1.0) / following * (new - found)
        found, momentum = new, following
    coefficients = found[1:] / deviation
    return float(found[0] - coefficients @ mean), coefficients


def limits(log_odds: Vector, kinds: npt.NDArray[np.object_]) -> tuple[float, float]:
    """Above which log odds to say SAME, and below which DIFFERENT, so that neither is wrong too often."""
    above = max(float(np.quantile(log_odds[kinds == kind], 1.0 - _MAX_FALSE_SAME)) for kind in DIFFERENT)
    right = sum(float((log_odds[kinds == kind] > above).mean()) for kind in SAME)
    below = above
    while sum(float((log_odds[kinds == kind] < below).mean()) for kind in SAME) > _MAX_FALSE_DIFFERENT * right:
        below -= _STEP_OF_LIMIT
    return above, below


async def features_of(
    found: list[Pair], judge: EmbeddingJudge, questions: dict[str, npt.NDArray[np.float32]]
) -> Vector:
    """float64 [len(found), len(FEATURES)]"""
    read: dict[str, Read] = {}
    for answer in {pair.fresh.answer for pair in found} | {pair.cached.answer for pair in found}:
        parts = Answer.of(answer)
        read[answer] = Read(parts, await judge.embedded(parts.passages))
    return np.array(
        [
            compared(
                questions[pair.fresh.question],
                facts_of(pair.fresh.question),
                read[pair.fresh.answer],
                read[pair.cached.answer],
            )
            for pair in found
        ]
    )


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semantic.fit_judge", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {_FITTED.name}")
    options = parser.parse_args()
    answers = [answer for answer in labelled() if not is_held_out(answer.group)]
    vectors = open_vectors()
    vectors.learn([answer.question for answer in answers])
    found = pairs(answers, vectors.known)
    features = asyncio.run(features_of(found, EmbeddingJudge(vectors), vectors.known))
    kinds = np.array([pair.kind for pair in found], dtype=object)
    same = np.array([pair.kind in SAME for pair in found])
    intercept, coefficients = fit(features, same, np.array([_WEIGHTS[kind] for kind in kinds]))
    log_odds = intercept + features @ coefficients
    above, below = limits(log_odds, kinds)
    for name, coefficient in zip(FEATURES, coefficients, strict=True):
        print(f"{coefficient:9.3f}  {name}")
    print(f"{intercept:9.3f}  intercept; same above {above:.3f}, different below {below:.3f}")
    for kind in (*SAME, *DIFFERENT):
        of = log_odds[kinds == kind]
        print(f"{kind.value:32} {len(of):6} pairs: same {(of > above).mean():.4f}, different {(of < below).mean():.4f}")
    if options.write:
        _FITTED.write_text(_source(intercept, coefficients, above, below), encoding="utf-8")


def _source(intercept: float, coefficients: Vector, above: float, below: float) -> str:
    listed = "\n".join(f"    {c:.3f},  # {name}" for name, c in zip(FEATURES, coefficients, strict=True))
    return f'''\
"""The coefficients of the default judge. Written by `python -m benchmarks.semantic.fit_judge --write`."""

from typing import Final

from cache.semantic.policy.posterior import JudgeError

INTERCEPT: Final = {intercept:.3f}
COEFFICIENTS: Final = (
{listed}
)
SAME_ABOVE: Final = {above:.3f}
DIFFERENT_BELOW: Final = {below:.3f}
"""Limits of the log odds."""
ERROR: Final = JudgeError(recall=1.0, false_same=0.01)
"""Of SAME against everything else. To call it better at same answers than it is keeps the budget, to call it worse does
not: an upstream that words an answer always alike is never misjudged.
"""
'''


if __name__ == "__main__":
    _main()
