"""On real questions, through the vetoes: the budget holds, and the simulation counts what it should."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.semantic.intent_data import banking77, clinc150, half_unrepeatable, sparse
from benchmarks.semantic.streams import best_within
from cache.semantic.evaluation.simulation import (
    Outcome,
    Questions,
    Stream,
    StreamJudge,
    serve_by_threshold,
    serve_in_budget,
)
from cache.semantic.policy.policy import JudgeError

ERRS = StreamJudge("errs and is silent", JudgeError(0.98, 0.01), silent=0.15)
SURE = StreamJudge("never errs", JudgeError(1.0, 0.0))


def test_the_data_is_what_was_published() -> None:
    """The splits have their sizes, and nobody out of scope wants what another wants."""
    banking, clinc = banking77("test"), clinc150("test")
    assert (len(banking.texts), len(set(banking.answers.tolist()))) == (3080, 77)
    assert (len(clinc.texts), len(set(clinc.answers.tolist()))) == (5500, 150 + 1000)
    assert len(banking77("train").texts) == 10_003
    assert not set(banking.texts) & set(banking77("train").texts)


def test_the_harder_streams_are_made_of_the_same_questions() -> None:
    """Half of the answers never come again; or no answer comes more than a dozen times."""
    banking, clinc = banking77("test"), clinc150("test")
    both = banking + clinc
    assert len(set(both.answers.tolist())) == 77 + 150 + 1000
    half = Counter(half_unrepeatable(banking).answers.tolist())
    assert Counter(half.values()) == {1: 38 * 40, 40: 39}
    assert max(Counter(sparse(both).answers.tolist()).values()) == 12
    assert set(sparse(both).texts) <= set(both.texts)


def made(topics: int, each: int, spread: float) -> Stream:
    """Questions of Banking77 whose vectors gather around one direction for each intent."""
    banking = banking77("test")
    chosen = [place for answer in range(topics) for place in np.flatnonzero(banking.answers == answer)[:each].tolist()]
    chance = np.random.default_rng(3)
    centres = chance.normal(size=(topics, 32))
    answers = banking.answers[chosen]
    vectors = centres[answers] + spread * chance.normal(size=(len(chosen), 32))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return Stream(Questions(tuple(banking.texts[place] for place in chosen), answers), vectors.astype(np.float32))


def test_the_nearest_are_the_nearest_of_what_is_stored() -> None:
    """Found in the list made in advance or, where that is too short, by search: as by brute force."""
    stream = made(20, 40, 0.5)
    chance = np.random.default_rng(1)
    for stored_share in (0.005, 0.05, 0.9):
        stored = chance.random(stream.size) < stored_share
        question = int(np.flatnonzero(~stored)[0])
        near, similarities = stream.nearest(question, stored, 16)
        expected = np.sort((stream.vectors @ stream.vectors[question])[stored])[::-1][:16]
        assert stored[near].all()
        assert similarities == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("judge", [SURE, ERRS], ids=["sure", "errs"])
def test_the_budget_holds_on_questions_that_go_through_the_vetoes(judge: StreamJudge) -> None:
    """There are hits, and what is wrong of them stays within delta."""
    stream = made(20, 40, 0.7)
    outcomes = [serve_in_budget(stream, stream.order(seed), seed, 0.02, judge).end.outcome for seed in range(3)]
    assert np.mean([outcome.wrong for outcome in outcomes]) <= 0.02
    assert min(outcome.hits for outcome in outcomes) > 0.1
    assert max(outcome.audits for outcome in outcomes) <= 0.02 + 5 / stream.size


def test_thresholds_trade_hits_for_wrong_answers() -> None:
    """The lower, the more of both; vetoes take away some; the best in hindsight is the best of those allowed."""
    stream = made(20, 40, 0.7)
    order = stream.order(0)
    plain = [serve_by_threshold(stream, order, at, with_vetoes=False) for at in (0.9, 0.7, 0.5, 0.3)]
    assert [o.hits for o in plain] == sorted(o.hits for o in plain)
    assert plain[-1].wrong > plain[0].wrong
    with_vetoes = serve_by_threshold(stream, order, 0.5, with_vetoes=True)
    assert with_vetoes.hits < plain[2].hits
    assert best_within(plain, plain[1].wrong).wrong <= plain[1].wrong
    assert best_within(plain, -1.0) == Outcome(0.0, 0.0, 0.0)
