"""RedisVL's SemanticCache with a Redis of its own that has RediSearch.

A program: `python -m benchmarks.semantic.peer_caches.redisvl_cache JOB.json OUTCOME.json`.
"""

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path

from redisvl.extensions.cache.llm import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    SemanticCache,
)
from redisvl.utils.vectorize import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    HFTextVectorizer,
)

from benchmarks.semantic.peer_caches.stream import Job, Opening, run


class RedisVl:
    """Its calls that do not await: they are the quicker ones where there is nothing else to do."""

    audits = False

    def __init__(self, job: Job) -> None:
        self._model = HFTextVectorizer(model=job.model)
        own = {} if job.threshold is None else {"distance_threshold": 1 - job.threshold}
        self._cache = SemanticCache(vectorizer=self._model, redis_url=job.redis, overwrite=True, **own)
        self._vector: list[float] = []
        self.embedding: list[float] = []

    async def look_up(self, question: str) -> str | None:
        # As `check(prompt=question)` does, but the vector is at hand for `store`.
        began = time.perf_counter()
        self._vector = self._model.embed(question)
        self.embedding.append(1e3 * (time.perf_counter() - began))
        hits = self._cache.check(vector=self._vector)
        said: str | None = hits[0]["response"] if hits else None
        return said

    async def keep(self, question: str, answer: str) -> None:
        self._cache.store(question, answer, vector=self._vector)


@asynccontextmanager
async def opened(job: Job, folder: Path) -> Opening:
    yield RedisVl(job)


if __name__ == "__main__":
    asyncio.run(run(opened, ("redisvl", "sentence-transformers", "redis")))
