"""The judge of the product, on the answers that an upstream gives to the questions of a stream."""

import asyncio
import random
from collections.abc import Sequence

from benchmarks.semantic.judge import Vectors, open_vectors
from cache.semantic.evaluation.simulation import StreamJudge
from cache.semantic.judge.answer import Answer
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.error_rates import PRIOR_ERROR


class AnswerJudge(StreamJudge):
    """The default judge, which is not told what is true: it compares the texts.

    Args:
        questions, answers: of a stream, by number.
    """

    def __init__(self, questions: Sequence[str], answers: Sequence[str]) -> None:
        super().__init__("the default one, on written answers", PRIOR_ERROR)
        self._questions = questions
        self._answers = answers
        self._judge = EmbeddingJudge(_vectors_of(questions, answers).embed, kept=1 << 16)
        self._said: dict[tuple[int, str], bool | None] = {}

    def compare(self, asked: int, other: int, same: bool, chance: random.Random) -> bool | None:
        pair = asked, self._answers[other]
        if pair not in self._said:
            self._said[pair] = self._judged(asked, self._answers[other])
        return self._said[pair]

    def _judged(self, asked: int, cached: str) -> bool | None:
        question, fresh = self._questions[asked], self._answers[asked]
        (score,) = asyncio.run(self._judge.compare("", question, fresh, [cached]))
        return None if score is None else score > self._judge.same_above


def _vectors_of(questions: Sequence[str], answers: Sequence[str]) -> Vectors:
    vectors = open_vectors()
    read = [Answer.of(answer) for answer in set(answers)]
    vectors.learn([*questions, *(part for answer in read for part in answer.passages)])
    return vectors
