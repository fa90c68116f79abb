"""Fits the coefficients of the default judge to the labelled answers that are not held out.

python -m benchmarks.semantic.fit_judge          print what was found
python -m benchmarks.semantic.fit_judge --write  and write cache/semantic/judge/fitted.py
"""

import argparse
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.semantic.judge import open_vectors, texts_of
from benchmarks.semantic.labelled_answers import (
    COMPARED,
    DIFFERENT,
    SAME,
    UNREPEATABLE_FILE,
    Kind,
    Pair,
    is_held_out,
    labelled,
    pairs,
)
from cache.semantic.judge.answer import Answer
from cache.semantic.judge.embedding_judge import EmbeddingJudge, Read, compared, contradict
from cache.semantic.judge.judge import MAX_SCORE

_FITTED = Path(__file__).resolve().parents[2] / "cache" / "semantic" / "judge" / "fitted.py"

Floats = npt.NDArray[np.float64]

# The features, with the sign of each coefficient: a fit must not turn evidence for equality into evidence against it,
# on any data. A copy that says something else was found out before, so likeness of words counts against both.
_SIGNS = {
    "cosine": 1,
    "shared words": 1,
    "shared numbers": 1,
    "difference in negations": -1,
    "a copy": -1,
}
# There are many more pairs of some kinds than of others, and some matter more: each pair's weight. The answers of one
# upstream to wordings of one question are much alike, so these count most of what is the same.
_WEIGHTS = {
    Kind.FREE: 0.2,
    Kind.CHAT: 12.0,
    Kind.CONTRADICTING: 1.0,
    Kind.NEAR: 3.0,
    Kind.RELATED: 0.3,
    Kind.OTHER: 0.2,
}
# Of the different pairs of each kind that an upstream gives, how many may be called the same. Below what is promised
# (.01), because groups differ more from each other than pairs do: a limit that just holds on some is broken on others.
_MAX_FALSE_SAME = 0.005
_RIDGE = 3.0
_STEPS = 2000


def fit(
    features: Floats, same: npt.NDArray[np.bool_], weights: Floats, feature_signs: npt.NDArray[np.int64]
) -> tuple[float, Floats]:
    """Intercept and coefficients [features] of the likeliest logistic model whose coefficients have their signs.

    By accelerated projected gradient descent (Beck and Teboulle, SIAM J. Imaging Sci. 2(1), 2009) on features of
    mean 0 and deviation 1, with a ridge on the coefficients.
    """
    mean, deviation = features.mean(axis=0), features.std(axis=0) + 1e-9
    scaled = np.column_stack([np.ones(len(features)), (features - mean) / deviation])
    signs = np.concatenate([[0], feature_signs])
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


def limit(scores: Floats, kinds: npt.NDArray[np.object_]) -> float:
    """Above which score two answers are called the same, so that this is not wrong too often."""
    return max(float(np.quantile(scores[kinds == kind], 1.0 - _MAX_FALSE_SAME)) for kind in COMPARED)


async def read(answers: Iterable[str], judge: EmbeddingJudge) -> dict[str, Read]:
    return {answer: await judge.read(answer) for answer in answers}


def features_of(found: Sequence[Pair], answers: Mapping[str, Read]) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """float64 [len(found), len(_SIGNS)], and which pairs contradict each other, bool [len(found)]."""
    questions = {question: Answer.of(question) for question in {pair.fresh.question for pair in found}}
    pairs_read = [
        (questions[pair.fresh.question], answers[pair.fresh.answer], answers[pair.cached.answer]) for pair in found
    ]
    values = [compared(asked, fresh, cached) for asked, fresh, cached in pairs_read]
    against = [contradict(fresh.answer, cached.answer) for _, fresh, cached in pairs_read]
    return np.array([[of[name] for name in _SIGNS] for of in values]), np.array(against)


def disagreement(alike: Floats, of_one_question: Floats) -> tuple[float, float]:
    """Intercept and slope of the log likelihood ratio of a score: of answers to one question that disagree, against
    one answer in other words. Both kinds weigh the same."""
    scores = np.concatenate([alike, of_one_question])
    differ = np.concatenate([np.zeros(len(alike), bool), np.ones(len(of_one_question), bool)])
    weights = np.where(differ, 1.0 / len(of_one_question), 1.0 / len(alike)) * len(scores) / 2
    intercept, slope = fit(scores[:, None], differ, weights, np.array([-1]))
    return intercept, float(slope[0])


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semantic.fit_judge", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {_FITTED.name}")
    options = parser.parse_args()
    answers = [answer for answer in labelled() if not is_held_out(answer.group)]
    others = [answer for answer in labelled(UNREPEATABLE_FILE) if not is_held_out(answer.group)]
    vectors = open_vectors()
    vectors.learn(texts_of([*answers, *others]))
    found = [*pairs(answers, vectors.known), *pairs(others, vectors.known)]
    judge = EmbeddingJudge(vectors.embed)
    known = asyncio.run(read({answer.answer for answer in (*answers, *others)}, judge))
    features, against = features_of(found, known)
    kinds = np.array([pair.kind for pair in found], dtype=object)
    # Answers to one question that disagree are for the last two coefficients alone.
    differ = np.array([pair.fresh in others and pair.fresh.group == pair.cached.group for pair in found])
    kinds[differ] = None
    fitted = ~(against | differ)
    weights = np.array([_WEIGHTS[kind] for kind in kinds[fitted]])
    same = np.array([kind in SAME for kind in kinds[fitted]])
    intercept, coefficients = fit(features[fitted], same, weights, np.array(list(_SIGNS.values())))
    scores = np.clip(np.where(against, -MAX_SCORE, intercept + features @ coefficients), -MAX_SCORE, MAX_SCORE)
    above = limit(scores, kinds)
    of_disagreement = disagreement(scores[kinds == Kind.CHAT], scores[differ])
    for name, coefficient in zip(_SIGNS, coefficients, strict=True):
        print(f"{coefficient:9.3f}  {name}")
    print(f"{intercept:9.3f}  intercept; the same above {above:.3f}; disagreement {of_disagreement}")
    for kind in (*SAME, *DIFFERENT):
        of = scores[kinds == kind]
        print(f"{kind.value:32} {len(of):6} pairs: the same {(of > above).mean():.4f}")
    if options.write:
        _FITTED.write_text(_source(intercept, coefficients, above, of_disagreement), encoding="utf-8")


def _source(intercept: float, coefficients: Floats, above: float, of_disagreement: tuple[float, float]) -> str:
    listed = "\n".join(f'    "{name}": {c:.3f},' for name, c in zip(_SIGNS, coefficients, strict=True))
    return f'''\
"""The coefficients of the default judge. Written by `python -m benchmarks.semantic.fit_judge --write`."""

from typing import Final

INTERCEPT: Final = {intercept:.3f}
COEFFICIENTS: Final = {{
{listed}
}}
SAME_ABOVE: Final = {above:.3f}
"""Limit of the log odds: so many different answers on one subject are called the same as may be."""
DISAGREEMENT: Final = {of_disagreement[0]:.3f}
DISAGREEMENT_OF_SCORE: Final = {of_disagreement[1]:.3f}
"""Of two answers to one question: the log likelihood ratio that they disagree, by their score."""
'''


if __name__ == "__main__":
    _main()
