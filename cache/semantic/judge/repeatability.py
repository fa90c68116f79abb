"""Answers that are no function of their question: a poem, a random pick, whatever a high temperature draws.

They are recognised by disagreeing with themselves: fresh answers to the very same question that do not say the same.
Each such pair is evidence for its question, and for questions that are near to it, so that the second poem is known
from the first ones (docs/decisions/040-measured-judge.md).
"""

from collections.abc import Sequence
from typing import Protocol

from cache.semantic.judge.answer import AnswerClass
from cache.semantic.judge.error_rates import ErrorRates
from cache.semantic.judge.fitted import DISAGREEMENT, DISAGREEMENT_OF_SCORE

MAX_DISAGREEMENT = 6.0
"""Of the evidence of all pairs of one question."""
_MOST_OF_A_PAIR, _LEAST_OF_A_PAIR = 2.0, -4.0
_ESTABLISHED = -1.0
# Below the first similarity a question says nothing of another one, from the second on as much as of itself.
_NONE_BELOW, _ALL_ABOVE = 0.25, 0.7


class Answered(Protocol):
    """What is known of a question: see `Record`."""

    @property
    def model(self) -> str: ...
    @property
    def answers(self) -> AnswerClass: ...
    @property
    def disagreement(self) -> float: ...


def disagreement_of(score: float) -> float:
    """The log likelihood ratio of a judge's score of two answers to the very same question: above 0 if it is likelier
    of answers that disagree than of one answer in other words."""
    return max(_LEAST_OF_A_PAIR, min(_MOST_OF_A_PAIR, DISAGREEMENT + DISAGREEMENT_OF_SCORE * score))


def is_repeatable(answered: Answered) -> bool:
    """Whether earlier answers to this question have shown that it has one answer, whatever the judge called them."""
    return answered.disagreement < _ESTABLISHED


def is_unrepeatable(errors: ErrorRates, answered: Answered) -> bool:
    """Whether answers to this question probably disagree with each other, by its own answers."""
    return errors.unrepeatable(answered.model, answered.answers) + answered.disagreement > 0.0


def repeatable(errors: ErrorRates, near: Sequence[tuple[Answered, float]]) -> list[bool]:
    """Which of the neighbours of a question have answers that may be served, from each with its similarity.

    All are False if the question itself, by the evidence of all of them, is one whose answers disagree.
    """
    if not near:
        return []
    evidence = sum(_weight(similarity) * answered.disagreement for answered, similarity in near)
    if errors.unrepeatable(near[0][0].model, near[0][0].answers) + evidence > 0.0:
        return [False] * len(near)
    return [not is_unrepeatable(errors, answered) for answered, _ in near]


def _weight(similarity: float) -> float:
    return min(1.0, max(0.0, (similarity - _NONE_BELOW) / (_ALL_ABOVE - _NONE_BELOW)))
