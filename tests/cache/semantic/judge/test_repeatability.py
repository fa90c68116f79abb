"""Answers that are no function of their question are recognised by their own disagreement."""

import random
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.semantic.judge import Vectors, asked_again, open_vectors, texts_of
from benchmarks.semantic.labelled_answers import UNREPEATABLE_FILE, is_held_out, labelled
from cache.semantic.judge.answer import AnswerClass
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.error_rates import ErrorRates
from cache.semantic.judge.fitted import SAME_ABOVE
from cache.semantic.judge.judge import MAX_SCORE
from cache.semantic.judge.repeatability import disagreement_of, is_unrepeatable, repeatable


class Asked(NamedTuple):
    model: str
    answers: AnswerClass
    disagreement: float


def asked(*scores: float) -> Asked:
    return Asked("m", "prose", sum(map(disagreement_of, scores)))


@pytest.fixture
def errors() -> ErrorRates:
    return ErrorRates(SAME_ABOVE)


def test_one_disagreement_is_no_proof_and_several_are(errors: ErrorRates) -> None:
    """A deterministic answer in other words is often not recognised, but not every time by far."""
    assert not is_unrepeatable(errors, asked())
    assert not is_unrepeatable(errors, asked(-MAX_SCORE))
    assert is_unrepeatable(errors, asked(*[-MAX_SCORE] * 3))


def test_an_answer_that_agrees_with_itself_is_repeatable(errors: ErrorRates) -> None:
    """One agreement outweighs a disagreement, which is then the judge's."""
    assert not is_unrepeatable(errors, asked(-MAX_SCORE, -MAX_SCORE, MAX_SCORE))


def test_wordings_that_are_nearly_recognised_are_no_disagreement(errors: ErrorRates) -> None:
    """Scores just below the limit say more of the judge's recall than of the answer."""
    assert not is_unrepeatable(errors, asked(*[SAME_ABOVE - 1.0] * 8))


def test_a_poem_is_known_from_other_poems(errors: ErrorRates) -> None:
    """The question's own answer was never asked for again; those of its neighbours disagree."""
    unknown, poem, fact = asked(), asked(*[-MAX_SCORE] * 3), asked(MAX_SCORE)
    assert repeatable(errors, [(unknown, 0.75)]) == [True]
    assert repeatable(errors, [(unknown, 0.75), (poem, 0.7), (poem, 0.65)]) == [False] * 3
    assert repeatable(errors, [(unknown, 0.75), (poem, 0.3), (poem, 0.2)]) == [True, False, False], "they are far"
    assert repeatable(errors, [(fact, 0.9), (poem, 0.6)]) == [True, False]
    assert repeatable(errors, []) == []


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return open_vectors()


async def test_written_poems_disagree_and_wordings_of_one_answer_do_not(errors: ErrorRates, vectors: Vectors) -> None:
    """Of answers that were not fitted to: after two pairs most poems and random picks are found, and few others."""
    poems = [answer for answer in labelled(UNREPEATABLE_FILE) if is_held_out(answer.group)]
    groups = sorted({answer.group for answer in labelled() if is_held_out(answer.group)})[::3]
    others = [answer for answer in labelled() if answer.group in groups]
    vectors.learn(texts_of([*poems, *others]))
    judge = EmbeddingJudge(vectors.embed, kept=1 << 14)
    drawn = await asked_again(judge, vectors, poems)
    worded = await asked_again(judge, vectors, others, a_models_wordings=True)
    assert np.mean([is_unrepeatable(errors, asked(*question.scores)) for question in drawn]) >= 0.5
    assert np.mean([is_unrepeatable(errors, asked(*question.scores)) for question in worded]) <= 0.05


def test_a_hundred_wordings_are_not_refused(errors: ErrorRates) -> None:
    """A judge that recognises half of an upstream's wordings does not take them for poems, however often they come."""
    chance = random.Random(1)  # noqa: S311  # reproducible
    refused = 0
    for _ in range(100):
        evidence = 0.0
        for _ in range(20):
            evidence = max(-6.0, min(6.0, evidence + disagreement_of(chance.gauss(1.2, 1.5))))
        refused += is_unrepeatable(errors, Asked("m", "prose", evidence))
    assert refused <= 1
