"""vCache, to which the budget policy is compared, keeps what its paper promises."""

import math
import random

import numpy as np
import pytest

from benchmarks.semantic.peer_caches.vcache import VCache, serve_by_vcache
from cache.semantic.evaluation.simulation import Questions, Stream, StreamJudge
from cache.semantic.policy.policy import JudgeError


def dice(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - reproducible


@pytest.mark.parametrize("delta", [0.05, 0.02])
@pytest.mark.parametrize("steepness", [15.0, 60.0])
def test_it_keeps_each_entrys_error(delta: float, steepness: float) -> None:
    """Over many entries with boundaries of their own: wrong answers stay within delta, and the near ones are served."""
    cache, truth = VCache(delta, dice(2)), dice(3)
    requests = hits = wrong = 0
    for entry in map(str, range(25)):
        boundary = truth.uniform(0.6, 0.9)
        for _ in range(160):
            similarity = truth.uniform(0.5, 1.0)
            right = truth.random() < 1 / (1 + math.exp(-steepness * (similarity - boundary)))
            requests += 1
            if cache.serves(entry, similarity):
                hits += 1
                wrong += not right
            else:
                cache.learn(entry, similarity, right)
    assert wrong / requests <= delta
    assert hits / requests > 0.02


def test_it_knows_each_entry_by_itself() -> None:
    """What one has shown serves no other."""
    cache = VCache(0.05, dice(0))
    for percent in range(50, 100):
        cache.learn("known", percent / 100, percent > 70)
    assert sum(cache.serves("known", 0.99) for _ in range(50)) > 10
    assert not any(cache.serves("new", 0.99) for _ in range(50))


def test_a_stream_is_served_within_delta() -> None:
    """Questions around one direction for each answer: some are served, few wrongly, and none is audited."""
    chance = np.random.default_rng(3)
    answers = np.repeat(np.arange(20), 40)
    vectors = chance.normal(size=(20, 32))[answers] + 0.7 * chance.normal(size=(answers.size, 32))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    stream = Stream(Questions(("",) * answers.size, answers), vectors.astype(np.float32))
    outcome = serve_by_vcache(stream, stream.order(0), 0.05, StreamJudge("never errs", JudgeError(1.0, 0.0)), 0)
    assert outcome.hits > 0.1
    assert outcome.wrong <= 0.05
    assert outcome.audits == 0.0
