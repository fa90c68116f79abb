"""The judge of the product, on the answers that an upstream gives to the questions of a stream."""

import asyncio
import random
from collections.abc import Sequence

from benchmarks.semantic.judge import Vectors, open_vectors
from cache.semantic.judge.answer import Answer
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.judge import Verdict


class AnswerJudge:
    """The default judge: what is true he has to find out from the texts.

    Args:
        questions, answers: of a stream, by number.
    """

    name = "the default one, on written answers"

    def __init__(self, questions: Sequence[str], answers: Sequence[str]) -> None:
        self._questions = questions
        self._answers = answers
        self._judge = EmbeddingJudge(_vectors_of(questions, answers), kept=1 << 16)
        self._said: dict[tuple[int, str], bool | None] = {}
        self.error = self._judge.error

    def compare(self, asked: int, other: int, same: bool, similarity: float, chance: random.Random) -> bool | None:
        pair = asked, self._answers[other]
        if pair not in self._said:
            self._said[pair] = self._judged(asked, self._answers[other])
        return self._said[pair]

    def _judged(self, asked: int, cached: str) -> bool | None:
        question, fresh = self._questions[asked], self._answers[asked]
        (verdict,) = asyncio.run(self._judge.compare(question, fresh, [cached]))
        if verdict is Verdict.UNSURE and not self._judge.doubts:
            return None
        return verdict is Verdict.SAME


def _vectors_of(questions: Sequence[str], answers: Sequence[str]) -> Vectors:
    vectors = open_vectors()
    passages = {passage for answer in set(answers) for passage in Answer.of(answer).passages}
    vectors.learn([*questions, *passages])
    return vectors
