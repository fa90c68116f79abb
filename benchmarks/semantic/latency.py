"""How long the semantic cache takes to answer a question: embedding, search and vetoes, on one core.

As a program it makes one of the measurements, in a process of its own: `python -m benchmarks.semantic.latency ENTRIES`.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.harness.measurement import Figure, Row, Target
from benchmarks.harness.processes import CannotMeasure, run_on_subject_core
from benchmarks.semantic.index import Mixture
from benchmarks.semantic.intent_data import banking77, clinc150, embedded
from cache.semantic.embedding.embedder import open_embedder
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.model_files import models_folder
from cache.semantic.evaluation.simulation import Questions
from cache.semantic.index.index import VectorIndex
from cache.semantic.index.table import Floats, Rows
from cache.semantic.inspection.decisions import Decisions
from cache.semantic.inspection.what_if import WhatIf
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.error_rates import ErrorRates
from cache.semantic.messages import LookupRequest
from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import JudgeError
from cache.semantic.service.answers import Answers
from cache.semantic.service.labels import Labels
from cache.semantic.service.learner import Learner
from cache.semantic.service.neighbours import Neighbours
from cache.semantic.service.records import Record
from cache.semantic.service.semantic_cache import SemanticCache
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text

_SIZES = (10_000, 1_000_000)
_QUESTIONS = 1_000
_ROUNDS = 3
_PARTITION = "public.00000000000000000000000000000000"
_LATER = 4e9
_PIECE = 1_000
_SETTLE_SECONDS = 900.0
_METHOD = """\
One process on one core with everything that the service of the semantic cache does for one question: its normal form,
the embedding of all-MiniLM-L6-v2, the search for sixteen neighbours in one partition, the weighing of their votes, the
vetoes over the texts of those with the winning answer, and the decision of the budget policy. Questions are those of
Banking77's test split, one after the other. Ten thousand entries are the questions of its train split; a million are
mixtures of real ones (see the semantic index), each with the text and the intent of the question that has the larger
part in it. The way over the socket is not in it. "Over a pair" is all vetoes over two texts that are both read for it;
in the service a question is read once, and what was read of the last 16,384 cached ones is kept."""


class Measured(msgspec.Struct, kw_only=True):
    """Milliseconds of each question, by step, and bytes for each entry of vectors, texts, ids and tables."""

    ask: list[float]
    embed: list[float]
    search: list[float]
    compare: list[float]
    pair: list[float]
    entry_bytes: float


async def measure(quick: bool) -> Figure:
    rows: list[Row] = []
    for entries in (1_000,) if quick else _SIZES:
        runs = [await _run(entries) for _ in range(1 if quick or entries > 100_000 else _ROUNDS)]
        beside = tuple(_beside(run) for run in runs)
        small = entries <= 10_000
        name = f"{entries:,} entries in one partition"
        for percent, target in ((50, 3.0 if small else 6.0), (99, 8.0 if small else None)):
            rows.append(
                Row(
                    what=f"{name}: embed, search, compare, p{percent}",
                    unit="ms",
                    rounds=tuple(float(np.percentile(run.ask, percent)) for run in runs),
                    target=Target("most", target) if target else None,
                    beside=beside,
                )
            )
        if small:
            pairs = tuple(float(np.median(run.pair)) for run in runs)
            rows.append(Row(what="all vetoes over a pair", unit="ms", rounds=pairs, target=Target("most", 0.1)))
        if not small or quick:
            bytes_of = tuple(run.entry_bytes for run in runs)
            rows.append(
                Row(what=f"{name}: memory an entry", unit="bytes", rounds=bytes_of, target=Target("most", 2560.0))
            )
    return Figure(figure="semantic_latency", title="The semantic cache's answer", method=_METHOD, rows=tuple(rows))


def _beside(run: Measured) -> dict[str, float | str]:
    steps = {"embed": run.embed, "search": run.search, "compare": run.compare}
    return {
        f"{step} p{percent} ms": round(float(np.percentile(times, percent)), 3)
        for step, times in steps.items()
        for percent in (50, 99)
    }


async def _run(entries: int) -> Measured:
    said = await run_on_subject_core("benchmarks.semantic.latency", str(entries))
    return msgspec.json.decode(said, type=Measured)


async def measure_here(entries: int, folder: Path) -> Measured:
    """One measurement, in this process."""
    encoder = load_encoder("default", folder)
    asked = banking77("test").texts[:_QUESTIONS]
    known = banking77("train")
    if entries > len(known.texts):
        known = known + clinc150("train")
    texts = known.texts
    vectors = embedded(texts if entries > len(texts) else texts[:entries], folder)
    neighbours = Neighbours(VectorIndex(encoder.dimensions))
    policy = BudgetPolicy(0.01, JudgeError(0.98, 0.01), random.Random(1))  # noqa: S311  # which hits are audited is no secret
    async with open_embedder(encoder) as embedder:
        judge = EmbeddingJudge(embedder.embed)
        labels = Labels(policy, ErrorRates(judge.same_above), "", "")
        learner = Learner(embedder, neighbours, Answers(None), judge, labels, entries)
        decisions = Decisions(WhatIf(policy.delta, JudgeError(0.98, 0.01)), shows_questions=False)
        cache = SemanticCache(embedder, learner, decisions, shares_purges=True)
        before = _resident()
        pieces = _pieces(vectors, known, entries)
        for piece in pieces:
            await neighbours.put(piece)
        neighbours.index.settle(_SETTLE_SECONDS)
        entry_bytes = (_resident() - before) / entries
        took = []
        for number, text in enumerate(asked):
            began = time.perf_counter()
            await cache.ask(LookupRequest(_PARTITION, text, 1.0, key=f"public.{number}", serve=True))
            took.append(1000 * (time.perf_counter() - began))
        times = {step: [1000 * each for each in cache.figures.times[step]] for step in ("embed", "search", "compare")}
    neighbours.close()
    return Measured(ask=took, entry_bytes=entry_bytes, pair=_pair_times(asked, texts), **times)


def _pair_times(asked: Sequence[str], known: Sequence[str]) -> list[float]:
    """Milliseconds of reading both texts of each of some pairs, and of all vetoes over them."""
    took = []
    for one, other in zip(asked, known, strict=False):
        began = time.perf_counter()
        compare(Text.of(one), [Text.of(other)])
        took.append(1000 * (time.perf_counter() - began))
    return took


def _pieces(vectors: Floats, known: Questions, entries: int) -> Iterator[list[tuple[Record, Floats]]]:
    number = 0
    for piece, places in _parts(vectors, entries):
        records = []
        for vector, place in zip(piece, places.tolist(), strict=True):
            entry = f"public.{number:032x}"
            text = "".join(list(known.texts[place]))  # of its own in memory, like one that came over a socket
            answer = f"{known.answers[place]}"
            records.append((Record(entry, _PARTITION, text, answer, "m", "0.0.0", 1.0, _LATER), vector))
            number += 1
        yield records


def _parts(vectors: Floats, entries: int) -> Iterator[tuple[Floats, Rows]]:
    """Vectors [≤ 10,000, d], and the number of the question whose text each has [≤ 10,000]."""
    if entries <= len(vectors):
        for start in range(0, entries, _PIECE):
            places = np.arange(start, min(start + _PIECE, entries))
            yield vectors[places], places
        return
    order, held_out = Mixture.order(len(vectors)), Mixture.held_out(len(vectors))
    for piece, first in Mixture.of(vectors).parted(entries):
        yield piece, order[held_out + first]


def _resident() -> float:
    """Bytes of memory that this process has for itself."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return float(line.split()[1]) * 1024
    raise CannotMeasure("/proc/self/status does not tell the memory of this process")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.semantic.latency")
    parser.add_argument("entries", type=int)
    arguments = parser.parse_args()
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(measure_here(arguments.entries, models_folder()))))
