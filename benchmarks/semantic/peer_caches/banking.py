"""A bank's customers: the streams of questions that every cache is asked, and what the upstream answers."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.semantic.intent_data import banking77, embedded, half_unrepeatable
from cache.semantic.evaluation.simulation import Questions, Stream, serve_by_threshold

MAX_WRONG = 0.01
"""Of all requests, for a threshold that is chosen in hindsight."""
THRESHOLDS = tuple(round(1 - step / 200, 3) for step in range(1, 121))
"""Cosine similarities among which it is chosen."""

_FOLDER = Path(__file__).resolve().parent
_QUESTIONS = _FOLDER.parents[1] / "data" / "semantic" / "banking77_test.csv"
_ANSWERS = _FOLDER / "banking_answers.json"
_ORDER = 7
_QUICK = 100


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions in the order in which they are asked, with the upstream's answers; `stream` is of the same order."""

    name: str
    questions: list[str]
    answers: list[str]
    stream: Stream


def streams(quick: bool, models: Path) -> list[Asked]:
    """Banking77's test split in one random order, and half unrepeatable; the first questions only if `quick`.

    `models` is the folder of the compiled encoder.
    """
    questions = banking77("test")
    kinds = {"Banking77": questions}
    if not quick:
        kinds["half unrepeatable"] = half_unrepeatable(questions)
    order = np.random.default_rng(_ORDER).permutation(len(questions.texts))[: _QUICK if quick else None]
    texts = tuple(questions.texts[place] for place in order)
    vectors = embedded(texts, models)
    made = []
    for name, kind in kinds.items():
        answers = answers_of(kind)
        stream = Stream(Questions(texts, kind.answers[order]), vectors)
        made.append(Asked(name, list(texts), [answers[place] for place in order], stream))
    return made


def answers_of(questions: Questions) -> list[str]:
    """What the upstream says to each of Banking77's test questions, which may be half unrepeatable.

    The answer for its intent, with a case number where the question wants an answer of its own.
    """
    by_intent: dict[str, str] = json.loads(_ANSWERS.read_text(encoding="utf-8"))
    with _QUESTIONS.open(encoding="utf-8", newline="") as file:
        intents = [row["category"] for row in csv.DictReader(file)]
    wanted, counts = np.unique(questions.answers, return_counts=True)
    own = set(wanted[counts == 1].tolist())
    return [
        f"{by_intent[intent]} Your case number is {number}." if number in own else by_intent[intent]
        for number, intent in zip(questions.answers.tolist(), intents, strict=True)
    ]


def hindsight(asked: Asked) -> Sequence[float]:
    """Thresholds that are wrong in few enough requests of this very order, the one with the most hits first."""
    order = np.arange(asked.stream.size)
    found = {each: serve_by_threshold(asked.stream, order, each, with_vetoes=False) for each in THRESHOLDS}
    within = [threshold for threshold, outcome in found.items() if outcome.wrong <= MAX_WRONG]
    return sorted(within, key=lambda threshold: -found[threshold].hits)
