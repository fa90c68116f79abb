"""GPTCache as its documentation starts it, `init_similar_cache`: SQLite, FAISS and the distance of two embeddings.

A program: `python -m benchmarks.semantic.peer_caches.gptcache_cache JOB.json OUTCOME.json`.
"""

import asyncio
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gptcache import Cache, Config  # type: ignore[import-not-found,import-untyped,unused-ignore]
from gptcache.adapter.api import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    get,
    init_similar_cache,
    put,
)
from gptcache.embedding import SBERT  # type: ignore[import-not-found,import-untyped,unused-ignore]
from gptcache.manager import manager_factory  # type: ignore[import-not-found,import-untyped,unused-ignore]

from benchmarks.semantic.peer_caches.stream import Job, Opening, run

_MAX_DISTANCE = 4.0
"""The squared distance of opposite unit vectors, which GPTCache rates 0; it rates equal ones 4."""


class GptCache:
    """Embeds a question once, though `put` after `get` asks for it twice: only the first is timed."""

    audits = False

    def __init__(self, job: Job, folder: Path) -> None:
        self._model = SBERT(job.model)
        self._embedded: tuple[str, Any] = ("", None)
        self.embedding: list[float] = []
        self._cache = Cache()
        # Its own default evicts beyond a thousand entries; none of the others does.
        manager = manager_factory(
            "sqlite,faiss",
            data_dir=str(folder / "gptcache"),
            vector_params={"dimension": self._model.dimension},
            eviction_params={"max_size": len(job.questions)},
        )
        init_similar_cache(
            cache_obj=self._cache,
            embedding=self._model,
            data_manager=manager,
            config=Config() if job.threshold is None else Config(similarity_threshold=_rating(job.threshold)),
        )
        self._cache.embedding_func = self._embed

    async def look_up(self, question: str) -> str | None:
        self._embedded = ("", None)
        said: str | None = get(question, cache_obj=self._cache)
        return said

    async def keep(self, question: str, answer: str) -> None:
        put(question, answer, cache_obj=self._cache)

    def _embed(self, text: str, **extra: object) -> Any:
        if self._embedded[0] != text:
            began = time.perf_counter()
            self._embedded = (text, self._model.to_embeddings(text))
            self.embedding.append(1e3 * (time.perf_counter() - began))
        return self._embedded[1]


@asynccontextmanager
async def opened(job: Job, folder: Path) -> Opening:
    yield GptCache(job, folder)


def _rating(similarity: float) -> float:
    """GPTCache's threshold, the share of its best rating, for a cosine similarity of unit vectors."""
    return 1 - (2 - 2 * similarity) / _MAX_DISTANCE


if __name__ == "__main__":
    asyncio.run(run(opened, ("gptcache", "sentence-transformers", "faiss-cpu")))
