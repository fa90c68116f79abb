"""A stream of questions, as a file has it."""

from collections.abc import Sequence
from typing import NamedTuple

from cache.semantic.evaluation.rows import Columns, Rows
from cache.semantic.normal_form.normal_form import normal_form

COLUMNS = Columns(("question", "answer_id"), ("lang",))


class AskedQuestion(NamedTuple):
    """A question, the name of the answer that is right for it, and its language, "" where the file says none."""

    text: str
    answer: str
    language: str


class StreamOptions(NamedTuple):
    """How a stream is asked: see JudgeError, and in how many random `orders`; 0 is the file's order."""

    judge_recall: float
    judge_false_same: float
    orders: int
    seed: int


class Repeats(NamedTuple):
    """Questions that the exact cache and the normal form answer: they were asked before, word for word.

    `other_answers` counts those that want another answer than the first time: no cache can tell.
    """

    questions: int
    other_answers: int


def stream_of(rows: Rows) -> list[AskedQuestion]:
    """The questions of rows that have these columns, in their order. Raises UnreadableFile."""
    asked = []
    for row in rows.rows:
        for column in COLUMNS.required:
            if not row.values[column].strip():
                raise rows.error(row, column, "is empty; every row must have a question and the id of its answer")
        text, answer, language = (row.values[column] for column in COLUMNS.all)
        asked.append(AskedQuestion(text, answer.strip(), language.strip()))
    return asked


def without_repeats(asked: Sequence[AskedQuestion]) -> tuple[list[AskedQuestion], Repeats]:
    """The questions that reach the semantic cache: each the first time, in their order."""
    first: dict[str, AskedQuestion] = {}
    repeats = others = 0
    for question in asked:
        words = normal_form(question.text) or question.text
        if words in first:
            repeats += 1
            others += first[words].answer != question.answer
        else:
            first[words] = question
    return list(first.values()), Repeats(repeats, others)
