"""How often the judge errs, measured on answers of which it is known whether they say the same.

The same question asked twice has answers that say the same; unrelated questions have answers that do not. What the
judge says of such pairs is counted for each upstream model and each class of answers, and gives the limit above which
its scores mean "the same", and the error of its labels (docs/decisions/040-measured-judge.md).
"""

import functools
import math
from bisect import bisect_left
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from cache.semantic.judge.answer import AnswerClass
from cache.semantic.judge.judge import MAX_SCORE
from cache.semantic.policy.policy import JudgeError
from cache.semantic.policy.state import freeze, thaw

MAX_FALSE_SAME = 0.01
"""The share of different answers that may be called the same."""
CONFIDENCE = 0.9
"""Of the upper bounds of both errors: more recall, and more false "same", than there is keeps the budget."""

PRIOR_ERROR = JudgeError(recall=1.0, false_same=MAX_FALSE_SAME)
"""Before there are pairs: "different" counts in full."""

PAIR = "judged pair"
"""The kind of a pair, for `freeze` and `thaw`."""
_STATE = "judge's errors"
_BINS = 80
_MAX_CLASSES = 256
# Older pairs fade, as an upstream's model may change under its name.
_HALVED_AT = 2000.0
# Before there are pairs a judge is taken to know all same answers.
_PRIOR_SAME, _PRIOR_MISSED = 9.9, 0.1
# The limit was fitted so that one of a hundred different answers on one subject is called the same.
_PRIOR_FALSE, _PRIOR_TOLD = 1.0, 99.0
# Questions whose answers disagree with each other are one in ten until their own say otherwise.
_PRIOR_UNREPEATABLE, _PRIOR_QUESTIONS = 1.0, 10.0
_GRID = (np.arange(4096) + 0.5) / 4096
_LOG_GRID, _LOG_REST = np.log(_GRID), np.log1p(-_GRID)

_Count = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
_Bins = Annotated[list[_Count], msgspec.Meta(min_length=_BINS, max_length=_BINS)]


class JudgedPair(msgspec.Struct, frozen=True, array_like=True):
    """What the judge said of two answers of `model`, of which it is known whether they say the same.

    `source` is "again" for two answers to a question whose answers are known to say the same, from earlier pairs;
    "first" for the first pair of a question, whose answer may be no function of it; "unrelated" for answers to
    unrelated questions. Of a first pair `unrepeatable` is the probability that they disagree.
    """

    model: Annotated[str, msgspec.Meta(max_length=256)]
    answers: AnswerClass
    source: Literal["again", "first", "unrelated"]
    score: Annotated[float, msgspec.Meta(ge=-MAX_SCORE, le=MAX_SCORE)]
    unrepeatable: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0


class _Counts(msgspec.Struct, array_like=True):
    """Pairs of one model and class, by score from the lowest to the highest."""

    same: _Bins = msgspec.field(default_factory=lambda: [0.0] * _BINS)
    unrelated: _Bins = msgspec.field(default_factory=lambda: [0.0] * _BINS)
    unrepeatable: _Count = 0.0
    questions: _Count = 0.0

    def __post_init__(self) -> None:
        if not self.unrepeatable <= self.questions:
            raise ValueError(f"{self.unrepeatable} of {self.questions} questions cannot be unrepeatable")

    @property
    def share_unrepeatable(self) -> float:
        return (self.unrepeatable + _PRIOR_UNREPEATABLE) / (self.questions + _PRIOR_QUESTIONS)

    def rates(self, same_above: float) -> tuple[float, JudgeError]:
        """The limit, from `same_above` on, and the judge's error with it."""
        return _rates(tuple(self.same), tuple(self.unrelated), same_above)


_NO_COUNTS = _Counts()
_Classes = Annotated[dict[str, _Counts], msgspec.Meta(max_length=_MAX_CLASSES)]


class ErrorRates:
    """The judge's limit and its errors, for each model and class of answers.

    Recall is that of answers to the same question, where earlier ones have shown that it has one answer: those of a
    poem always differ, and would make the judge look bad, and real differences be taken for its mistakes. The pairs
    that showed it are not counted, and need not have been called the same, so that the choice does not favour the
    judge.

    Unrelated answers are easier to tell apart than different answers to questions that are alike. So they only raise
    the limit and the false "same", above what was fitted on answers of the hard kind.

    Args:
        same_above: the limit where the traffic asks for no higher one.
    """

    def __init__(self, same_above: float) -> None:
        self._same_above = same_above
        # By class and model, the longest unused first.
        self._classes: _Classes = {}

    def limit(self, model: str, answers: AnswerClass) -> float:
        """The score above which two answers are called the same."""
        return self._counts(model, answers).rates(self._same_above)[0]

    def error(self, model: str, answers: AnswerClass) -> JudgeError:
        """Upper bounds of the judge's recall and of its share of false "same" at this limit."""
        return self._counts(model, answers).rates(self._same_above)[1]

    def unrepeatable(self, model: str, answers: AnswerClass) -> float:
        """The log odds that a question of which nothing is known has answers that disagree with each other."""
        share = self._counts(model, answers).share_unrepeatable
        return math.log(share / (1.0 - share))

    def count(self, pair: JudgedPair) -> None:
        """Count a pair, of this process or of another one."""
        name = f"{pair.answers} {pair.model}"
        counts = self._classes[name] = self._classes.pop(name, _Counts())
        if len(self._classes) > _MAX_CLASSES:
            del self._classes[next(iter(self._classes))]
        if pair.source == "first":
            counts.questions += 1.0
            counts.unrepeatable += pair.unrepeatable
            if counts.questions >= _HALVED_AT:
                counts.questions, counts.unrepeatable = counts.questions / 2, counts.unrepeatable / 2
        else:
            bins = counts.same if pair.source == "again" else counts.unrelated
            bins[_bin(pair.score)] += 1.0
            if sum(bins) >= _HALVED_AT:
                bins[:] = [number / 2 for number in bins]

    def snapshot(self) -> bytes:
        return freeze(_STATE, (self._classes,))

    def restore(self, state: bytes) -> None:
        """Take over what was counted. Raises UnusableState, and is then as before."""
        (self._classes,) = thaw(state, _STATE, tuple[_Classes])

    def figures(self) -> list[dict[str, Any]]:
        """For an operator: of every model and class that has pairs, their number, and what they show."""
        found = []
        for name, counts in self._classes.items():
            answers, _, model = name.partition(" ")
            limit, error = counts.rates(self._same_above)
            same, called_same = sum(counts.same), sum(counts.same[_bin(limit) :])
            figures = {
                "model": model,
                "answers": answers,
                "same_pairs": same,
                "unrelated_pairs": sum(counts.unrelated),
                "limit": limit,
                "recall": (called_same + _PRIOR_SAME) / (same + _PRIOR_SAME + _PRIOR_MISSED),
                "recall_upper": error.recall,
                "false_same_upper": error.false_same,
                "unrepeatable": counts.share_unrepeatable,
            }
            found.append(figures)
        return found

    def _counts(self, model: str, answers: AnswerClass) -> _Counts:
        return self._classes.get(f"{answers} {model}", _NO_COUNTS)


# Once a class is counted on, what its counts were before is not asked for again: room for some of these too.
@functools.lru_cache(2 * _MAX_CLASSES)
def _rates(same: tuple[float, ...], unrelated: tuple[float, ...], same_above: float) -> tuple[float, JudgeError]:
    """The lowest limit, from `same_above` on, above which there are few enough of the unrelated pairs."""
    first = _bin(same_above)

    def upper(place: int) -> float:
        false = sum(unrelated[place:])
        return _upper(false + _PRIOR_FALSE, sum(unrelated) - false + _PRIOR_TOLD)

    def are_few(place: int) -> bool:  # and then they are few above each higher place
        return not any(unrelated[place:]) or upper(place) <= MAX_FALSE_SAME

    place = first + bisect_left(range(first, _BINS - 1), True, key=are_few)
    found = sum(same[place:])
    recall = _upper(found + _PRIOR_SAME, sum(same) - found + _PRIOR_MISSED)
    limit = same_above if place == first else place * 2 * MAX_SCORE / _BINS - MAX_SCORE
    return limit, JudgeError(recall, min(max(upper(place), MAX_FALSE_SAME), recall / 2))


def _bin(score: float) -> int:
    return min(_BINS - 1, int((score + MAX_SCORE) / (2 * MAX_SCORE) * _BINS))


def _upper(successes: float, failures: float) -> float:
    """The CONFIDENCE quantile of a Beta distribution, within .001."""
    density = (successes - 1.0) * _LOG_GRID + (failures - 1.0) * _LOG_REST
    sums = np.cumsum(np.exp(density - density.max()))
    return float(_GRID[np.searchsorted(sums, CONFIDENCE * sums[-1])])
