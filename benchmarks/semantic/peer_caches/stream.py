"""A stream of questions, and what a semantic cache that begins empty says to each of them."""

import dataclasses
import importlib.metadata
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

Opening = AsyncIterator["SemanticCache"]
Opened = Callable[["Job", Path], AbstractAsyncContextManager["SemanticCache"]]
"""Opens an empty cache for a job, in the folder of the job, to which it may write."""


@dataclass(frozen=True, slots=True)
class Job:
    """`answers[i]` is what the upstream says to `questions[i]`.

    `model` is the folder of the embedding model, as sentence-transformers writes it. `threshold` is a cosine
    similarity; None leaves the cache at its own. `redis` is a URL of a server with RediSearch, "" for none.
    """

    questions: list[str]
    answers: list[str]
    model: str
    threshold: float | None
    redis: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`served[i]` is the answer that the cache gave to question i, None for a miss; `milliseconds[i]` how long it took.

    `embedding` is how long embeddings took, ms, of the last thousand look-ups at least. `audits` is how many of the
    hits were also sent to the upstream, `versions` what was measured.
    """

    served: list[str | None]
    milliseconds: list[float]
    embedding: list[float]
    audits: int
    versions: dict[str, str]


class SemanticCache(Protocol):
    async def look_up(self, question: str) -> str | None:
        """The answer of an earlier question, or None. This is what is timed, with the embedding of the question."""
        ...

    async def keep(self, question: str, answer: str) -> None:
        """Store the upstream's answer to the question that was looked up last."""
        ...

    @property
    def audits(self) -> bool:
        """Whether the upstream is to be asked although the last look-up was a hit."""
        ...

    @property
    def embedding(self) -> Sequence[float]:
        """How long the embeddings of questions took, ms, of the last thousand at least."""
        ...


async def serve(cache: SemanticCache, job: Job, versions: dict[str, str]) -> Outcome:
    """Look up every question; on a miss, and for an audit, the upstream answers and the cache is told."""
    served: list[str | None] = []
    milliseconds: list[float] = []
    audits = 0
    for question, answer in zip(job.questions, job.answers, strict=True):
        began = time.perf_counter()
        said = await cache.look_up(question)
        milliseconds.append(1e3 * (time.perf_counter() - began))
        served.append(said)
        audited = said is not None and cache.audits
        audits += audited
        if said is None or audited:
            await cache.keep(question, answer)
    return Outcome(served, milliseconds, list(cache.embedding), audits, versions)


async def run(opened: Opened, packages: Sequence[str]) -> None:
    """The whole program: reads the job from the file of its first argument and writes the outcome to the second."""
    source, target = map(Path, sys.argv[1:])
    job = Job(**json.loads(source.read_text(encoding="utf-8")))
    versions = {package: importlib.metadata.version(package) for package in packages}
    async with opened(job, source.parent) as cache:
        outcome = await serve(cache, job, versions)
    target.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
