"""The semantic cache beside those of other projects, on the same questions, in the same run."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import redis.asyncio

from benchmarks.harness.measurement import RATIO, Beside, Figure, Row
from benchmarks.harness.processes import CannotMeasure, cores, free_port, run_program, server
from benchmarks.semantic.peer_caches.banking import MAX_WRONG, THRESHOLDS, Asked, hindsight, streams
from benchmarks.semantic.peer_caches.keepgate_cache import DELTA
from benchmarks.semantic.peer_caches.stream import Job, Outcome
from cache.semantic.embedding.model_files import find_model, models_folder

GPTCACHE, REDISVL = "KEEPGATE_PEER_GPTCACHE", "KEEPGATE_PEER_REDISVL"
REDISEARCH = "KEEPGATE_PEER_REDISEARCH"
_HOW = {
    GPTCACHE: "the Python of an environment with gptcache, sentence-transformers, faiss-cpu and sqlalchemy",
    REDISVL: "the Python of an environment with redisvl and sentence-transformers",
    REDISEARCH: "a redis-server with RediSearch, such as Redis 8 or redis-stack-server, for RedisVL",
}
_OURS = "Keepgate"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_METHOD = """\
The {questions:,} questions of Banking77's test split in one random order, and the same where for every second intent
each question wants an answer of its own (half unrepeatable). Every cache begins empty, and is asked one question after
the other; on a miss the upstream answers and the answer is stored. The upstream is a table with one answer for each
intent, which for the unrepeatable ones goes on with a case number. So answers that say the same are the same words,
which is easier for Keepgate's judge than an upstream that words each answer anew. A hit is wrong where the question
it was stored for has another intent; shares are of all requests. All embed with all-MiniLM-L6-v2. A look-up is timed
in the process of the cache, on one core with one thread, from the question to the answer with the embedding, which is
most of it: Keepgate has a runtime of its own for the model, the others' embedders run sentence-transformers. Keepgate:
the parts of its service in one process, policy "budget" with delta {delta:g} and the default judge; what it has learned
from an answer is settled before the next question; the way over its socket is not timed, nor is reading the answer
from the gateway's own store. GPTCache: `init_similar_cache` with its SBERT embedding, SQLite, FAISS and its default
evaluation of distances, and room for all answers (its default keeps a thousand); the evaluations and the default
embedding by models of its own have to be downloaded from a hub and were not run. RedisVL: `SemanticCache` with
`HFTextVectorizer` and a Redis with RediSearch on the other core; its default embedding is likewise not run. "Default"
is each one's own threshold. "Best in hindsight" is the threshold with the most hits on this very order among {tried}
whose hits are wrong in at most {wrong:.0%} of requests, which nobody can know in advance: it is found with exact
search, and the cache itself then runs with it. Versions: {versions}. A cache whose Python is not named in {variables}
is left out."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A program of semantic_peer_caches, and the Python that runs it."""

    name: str
    module: str
    python: str
    needs_redis: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """What a cache made of a stream. `threshold` is None where it was the cache's own."""

    cache: str
    outcome: Outcome
    wrong: float
    threshold: float | None

    @property
    def hits(self) -> float:
        return sum(said is not None for said in self.outcome.served) / len(self.outcome.served)

    @property
    def audits(self) -> float:
        return self.outcome.audits / len(self.outcome.served)

    def milliseconds(self, percent: float) -> float:
        return float(np.percentile(self.outcome.milliseconds, percent))


@dataclass(frozen=True, slots=True)
class _Store:
    url: str
    versions: dict[str, str]


_NO_STORE = _Store("", {})


async def measure(quick: bool) -> Figure:
    peers = peers_of(os.environ)
    asked = await asyncio.to_thread(streams, quick, models_folder())
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for each in asked:
        runs = [await _run(Peer(_OURS, "keepgate_cache", sys.executable), each, None, _OURS)]
        thresholds = await asyncio.to_thread(hindsight, each)
        for peer in peers:
            runs.append(await _run(peer, each, None, f"{peer.name}, default"))
            runs.append(await _best(peer, each, thresholds))
        rows += rows_of(each.name, runs)
        for run in runs:
            versions |= run.outcome.versions
    return Figure(
        figure="semantic_peers",
        title="Beside other semantic caches",
        method=_METHOD.format(
            questions=len(asked[0].questions),
            delta=DELTA,
            tried=len(THRESHOLDS),
            wrong=MAX_WRONG,
            versions=", ".join(f"{package} {version}" for package, version in sorted(versions.items())),
            variables=" and ".join((GPTCACHE, REDISVL)),
        ),
        rows=tuple(rows),
    )


def peers_of(environment: Mapping[str, str]) -> list[Peer]:
    """Those that the environment names. Raises CannotMeasure if there is none, or RedisVL has no Redis."""
    peers = []
    if python := environment.get(GPTCACHE):
        peers.append(Peer("GPTCache", "gptcache_cache", python))
    if python := environment.get(REDISVL):
        if not environment.get(REDISEARCH):
            raise CannotMeasure(f"RedisVL needs a store. Name one: {REDISEARCH}: {_HOW[REDISEARCH]}")
        peers.append(Peer("RedisVL", "redisvl_cache", python, needs_redis=True))
    if not peers:
        wanted = "; ".join(f"{variable}: {how}" for variable, how in _HOW.items())
        raise CannotMeasure(f"No other semantic cache is there to compare with. Name one: {wanted}")
    return peers


def rows_of(stream: str, runs: Sequence[Run]) -> list[Row]:
    """All caches under each measure; the first of them is ours."""
    rows = [
        Row(what=f"{stream}, hits: {run.cache}", unit="share", rounds=(run.hits,), beside=(_beside(run),))
        for run in runs
    ]
    rows += [Row(what=f"{stream}, wrong: {run.cache}", unit="share", rounds=(run.wrong,)) for run in runs]
    for percent in (50, 99):
        rows += [
            Row(what=f"{stream}, look-up p{percent}: {run.cache}", unit="ms", rounds=(run.milliseconds(percent),))
            for run in runs
        ]
        rows += [
            Row(
                what=f"{stream}, look-up p{percent}: {run.cache} against {runs[0].cache}",
                unit=RATIO,
                rounds=(run.milliseconds(percent) / runs[0].milliseconds(percent),),
            )
            for run in runs[1:]
        ]
    return rows


def _beside(run: Run) -> Beside:
    beside: dict[str, float | str] = {"embedding p50 ms": float(np.median(run.outcome.embedding))}
    if run.cache == _OURS:
        beside["audits"] = run.audits
    if run.threshold is not None:
        beside["cosine similarity at least"] = run.threshold
    return beside | run.outcome.versions


async def _best(peer: Peer, asked: Asked, thresholds: Sequence[float]) -> Run:
    """The peer with the first of these thresholds at which it too is wrong rarely enough."""
    for threshold in thresholds:
        run = await _run(peer, asked, threshold, f"{peer.name}, best in hindsight")
        if run.wrong <= MAX_WRONG:
            return run
    raise CannotMeasure(f"{asked.name}: no threshold keeps {peer.name} within {MAX_WRONG:.0%} wrong answers.")


async def _run(peer: Peer, asked: Asked, threshold: float | None, name: str) -> Run:
    """A stream through a cache in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        async with _redis() if peer.needs_redis else contextlib.nullcontext(_NO_STORE) as store:
            model = str(find_model("default").folder)
            job = Job(asked.questions, asked.answers, model, threshold, store.url)
            outcome = await _outcome(peer, Path(folder), job)
            outcome = dataclasses.replace(outcome, versions=outcome.versions | store.versions)
    pairs = zip(outcome.served, asked.answers, strict=True)
    wrong = sum(said is not None and said != right for said, right in pairs) / len(asked.answers)
    return Run(name, outcome, wrong, threshold)


async def _outcome(peer: Peer, folder: Path, job: Job) -> Outcome:
    source, target = folder / "job.json", folder / "outcome.json"
    source.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
    program = f"benchmarks.semantic.peer_caches.{peer.module}"
    environment = {"HF_HUB_OFFLINE": "1", **dict.fromkeys(_ONE_THREAD, "1")}
    command = (peer.python, "-m", program, str(source), str(target))
    await run_program(peer.name, command, cores().subject, environment)
    return Outcome(**json.loads(target.read_text(encoding="utf-8")))


@asynccontextmanager
async def _redis() -> AsyncIterator[_Store]:
    """An empty store with RediSearch."""
    port = free_port()
    command = (os.environ[REDISEARCH], "--port", str(port), "--save", "", "--appendonly", "no")
    async with server(command, port, cores().load) as started:
        url = f"redis://127.0.0.1:{started.port}"
        client = redis.asyncio.from_url(url, protocol=2)
        try:
            said = await client.info("server", "modules")
        finally:
            await client.aclose()
        search = [module["ver"] for module in said.get("modules", ()) if module["name"] == "search"]
        if not search:
            raise CannotMeasure(f"{REDISEARCH}: that redis-server has no RediSearch; it has to be {_HOW[REDISEARCH]}")
        number = search[0]
        version = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        yield _Store(url, {"redis-server": str(said["redis_version"]), "RediSearch": version})
