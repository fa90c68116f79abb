"""Keepgate's semantic cache: the parts of its service, called as its service calls them.

A program: `python -m benchmarks.semantic.peer_caches.keepgate_cache JOB.json OUTCOME.json`.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from benchmarks.semantic.peer_caches.stream import Job, Opening, run
from cache.semantic.embedding.embedder import open_embedder
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.model_files import models_folder
from cache.semantic.index.index import VectorIndex
from cache.semantic.inspection.decisions import Decisions
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.error_rates import PRIOR_ERROR, ErrorRates
from cache.semantic.messages import AnswerStored, LookupHit, LookupMiss, LookupRequest
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.service.answers import Answers
from cache.semantic.service.labels import Labels
from cache.semantic.service.learner import Learner
from cache.semantic.service.neighbours import Neighbours
from cache.semantic.service.semantic_cache import SemanticCache

DELTA = 0.01
_PARTITION = "public.00000000000000000000000000000000"
_LATER = 4e9


class Keepgate:
    """Does what a gateway does: it keeps the answers, asks, and tells of fresh ones."""

    def __init__(self, cache: SemanticCache, learner: Learner) -> None:
        self._cache = cache
        self._learner = learner
        self._answers: dict[str, str] = {}
        self._asked = 0
        self._advice: LookupHit | LookupMiss = LookupMiss(0)

    @property
    def audits(self) -> bool:
        return isinstance(self._advice, LookupHit) and self._advice.audit

    @property
    def embedding(self) -> list[float]:
        return [1e3 * seconds for seconds in self._cache.figures.times["embed"]]

    async def look_up(self, question: str) -> str | None:
        self._asked += 1
        self._advice = await self._cache.ask(LookupRequest(_PARTITION, question, 1.0, key=self._key, serve=True))
        return self._answers[self._advice.entry] if isinstance(self._advice, LookupHit) else None

    async def keep(self, question: str, answer: str) -> None:
        self._answers[self._key] = answer
        body = {"choices": [{"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]}
        response = msgspec.json.encode(body)
        self._cache.answered(
            AnswerStored(self._advice.query, self._key, _PARTITION, question, "m", "0.0.0", 1.0, _LATER, response)
        )
        await self._learner.idle()  # or what is known at the next question would be a matter of chance

    @property
    def _key(self) -> str:
        return f"public.{self._asked:032x}"


@asynccontextmanager
async def opened(job: Job, folder: Path) -> Opening:
    encoder = load_encoder(job.model, models_folder())
    neighbours = Neighbours(VectorIndex(encoder.dimensions))
    async with open_embedder(encoder) as embedder:
        judge = EmbeddingJudge(embedder.embed)
        policy = BudgetPolicy(DELTA, PRIOR_ERROR, random.Random(1))  # noqa: S311  # which hits are audited is no secret
        labels = Labels(policy, ErrorRates(judge.same_above), "", "judge")
        learner = Learner(embedder, neighbours, Answers(None), judge, labels, len(job.questions))
        decisions = Decisions(None, shows_questions=False)
        cache = SemanticCache(embedder, learner, decisions, shares_purges=True)
        async with _working(learner):
            yield Keepgate(cache, learner)
    neighbours.close()


@asynccontextmanager
async def _working(learner: Learner) -> AsyncIterator[None]:
    work = asyncio.create_task(learner.work())
    try:
        yield
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work


if __name__ == "__main__":
    asyncio.run(run(opened, ("keepgate", "faiss-cpu")))
