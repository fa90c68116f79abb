"""Questions that people asked, with what they wanted: Banking77 and CLINC150, and streams made of them."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.encoder import vectors_of
from cache.semantic.embedding.load import load_encoder
from cache.semantic.evaluation.simulation import Questions

Split = Literal["train", "test"]

_DATA = Path(__file__).resolve().parents[1] / "data" / "semantic"
# Questions out of scope: each wants something else, so that no other's answer is right.
_OUT_OF_SCOPE = "oos"
_SPARSE = 12


def banking77(*splits: Split) -> Questions:
    rows = []
    for split in splits:
        with (_DATA / f"banking77_{split}.csv").open(encoding="utf-8", newline="") as file:
            rows += [(row["text"], row["category"]) for row in csv.DictReader(file)]
    return _questions(rows)


def clinc150(*splits: Split) -> Questions:
    """The test split; the other two are "train"."""
    with (_DATA / "clinc150_full.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if _split(row["split"]) in splits]
    return _questions([(row["text"], row["intent"]) for row in rows])


def half_unrepeatable(questions: Questions) -> Questions:
    """Of every second answer in random order, each question wants one of its own: what is near it is never right."""
    answers = np.unique(questions.answers)
    own = np.random.default_rng(5).permutation(answers)[: answers.size // 2]
    unique = np.arange(questions.answers.size) + answers.max() + 1
    return Questions(questions.texts, np.where(np.isin(questions.answers, own), unique, questions.answers))


def sparse(questions: Questions) -> Questions:
    """At most a dozen questions for each answer, so that there is little to learn from."""
    order = np.random.default_rng(9).permutation(questions.answers.size)
    kept: list[int] = []
    counts: dict[int, int] = {}
    for place in order.tolist():
        answer = int(questions.answers[place])
        counts[answer] = counts.get(answer, 0) + 1
        if counts[answer] <= _SPARSE:
            kept.append(place)
    kept.sort()
    return Questions(tuple(questions.texts[place] for place in kept), questions.answers[kept])


def embedded(texts: Sequence[str], folder: Path) -> npt.NDArray[np.float32]:
    """Their vectors by the default model, float32 [texts, dimensions]; kept in `folder` is the compiled encoder."""
    return vectors_of(texts, load_encoder("default", folder))


def _split(name: str) -> Split:
    return "test" if name in ("test", "oos_test") else "train"


def _questions(rows: Sequence[tuple[str, str]]) -> Questions:
    names = [intent if intent != _OUT_OF_SCOPE else f"{intent} {place}" for place, (_, intent) in enumerate(rows)]
    return Questions.of([text for text, _ in rows], names)
