"""A lookup whose neighbours are placed: what its vote and a threshold of its own serve."""

import random
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from cache.semantic.embedding.embedder import open_embedder
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.index.index import VectorIndex
from cache.semantic.inspection.decisions import Decisions
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.error_rates import PRIOR_ERROR, ErrorRates
from cache.semantic.messages import ExplainRequest, LookupHit, LookupRequest
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.service.answers import Answers
from cache.semantic.service.labels import Labels
from cache.semantic.service.learner import Learner
from cache.semantic.service.neighbours import Neighbours
from cache.semantic.service.records import Record
from cache.semantic.service.semantic_cache import SemanticCache

PARTITION = "a.context"
ASKED = "How do I reset my password?"
# Of each stored question: its cosine to the asked one, and whose answer it has.
STORED = {
    "I forgot the secret word of my account": (0.96, "a.nearest"),
    "My login was lost, what now": (0.94, "a.others"),
    "Which steps bring a lost login back": (0.93, "a.others"),
}


@pytest.fixture
async def cache(minilm: Encoder) -> AsyncIterator[SemanticCache]:
    """It has learned nothing, so that the budget serves nothing."""
    async with open_embedder(minilm) as embedder:
        neighbours = Neighbours(VectorIndex(minilm.dimensions))
        judge = EmbeddingJudge(embedder.embed)
        policy = BudgetPolicy(0.01, PRIOR_ERROR, random.Random(0))  # noqa: S311  # reproducible
        labels = Labels(policy, ErrorRates(judge.same_above), "policy", "judge")
        learner = Learner(embedder, neighbours, Answers(None), judge, labels, 100)
        asked, directions = minilm.encode([ASKED])[0], np.random.default_rng(0)
        for number, (text, (cosine, answer)) in enumerate(STORED.items()):
            other = directions.normal(size=minilm.dimensions).astype(np.float32)
            other -= (other @ asked) * asked
            vector = cosine * asked + np.sqrt(1 - cosine**2) * other / np.linalg.norm(other)
            entry = answer if answer == "a.nearest" else f"a.{number}"
            record = Record(entry, PARTITION, text, answer, "m", "0.0.0", 1.0, time.time() + 60)
            await neighbours.put([(record, vector)])
        yield SemanticCache(embedder, learner, Decisions(None, False), shares_purges=False)
        neighbours.close()


async def test_a_threshold_of_its_own_gets_the_nearest_neighbours_answer(cache: SemanticCache) -> None:
    """Whatever the other neighbours vote for: two that are a little farther have another answer."""
    found = await cache.ask(LookupRequest(PARTITION, ASKED, 1.0, threshold=0.95, key="a.key", serve=True))
    assert isinstance(found, LookupHit)
    assert (found.entry, found.audit) == ("a.nearest", False)
    assert found.similarity == pytest.approx(0.96, abs=1e-3)


async def test_a_threshold_above_the_nearest_similarity_gets_nothing(cache: SemanticCache) -> None:
    found = await cache.ask(LookupRequest(PARTITION, ASKED, 1.0, threshold=0.97, key="a.key", serve=True))
    assert not isinstance(found, LookupHit)


async def test_an_explanation_with_a_threshold_says_what_a_lookup_would(cache: SemanticCache) -> None:
    said = await cache.explain(ExplainRequest(PARTITION, ASKED, 1.0, threshold=0.95))
    assert (said.layer, said.entry) == ("semantic", "a.nearest")


async def test_without_a_threshold_the_answer_with_most_votes_is_meant(cache: SemanticCache) -> None:
    """It is named, and not served before the policy has learned."""
    said = await cache.explain(ExplainRequest(PARTITION, ASKED, 1.0))
    assert said.layer == ""
    assert said.entry in ("a.1", "a.2")
    assert "has learned from 0 of the 60 answers" in said.reason
