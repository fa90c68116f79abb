"""The comparison of semantic caches asks all of them the same questions and counts their answers."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.measurement import RATIO
from benchmarks.harness.processes import ROOT, CannotMeasure
from benchmarks.semantic.intent_data import banking77, half_unrepeatable
from benchmarks.semantic.peer_caches.banking import MAX_WRONG, THRESHOLDS, Asked, answers_of, hindsight
from benchmarks.semantic.peer_caches.stream import Job, Outcome, serve
from benchmarks.semantic.peers import GPTCACHE, REDISEARCH, REDISVL, Run, peers_of, rows_of
from cache.semantic.evaluation.simulation import Questions, Stream, serve_by_threshold


class ByFirstWord:
    """A cache that takes questions with one first word as equal, and has every second hit audited."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.told: list[str] = []
        self.hits = 0
        self.embedding = [1.0]

    @property
    def audits(self) -> bool:
        return self.hits % 2 == 0

    async def look_up(self, question: str) -> str | None:
        answer = self.kept.get(question.split()[0])
        self.hits += answer is not None
        return answer

    async def keep(self, question: str, answer: str) -> None:
        self.told.append(question)
        self.kept.setdefault(question.split()[0], answer)


async def test_a_cache_is_told_of_misses_and_of_audited_hits_only() -> None:
    """The upstream answers misses and audited hits only, and the cache keeps these answers."""
    cache = ByFirstWord()
    questions = ["how a", "how b", "who a", "how c", "who b"]

    outcome = await serve(cache, Job(questions, ["1", "2", "3", "4", "5"], "", None, ""), {"it": "1"})

    assert outcome.served == [None, "1", None, "1", "3"]
    assert cache.told == ["how a", "who a", "how c"]
    assert outcome.audits == 1
    assert outcome.embedding == [1.0]
    assert len(outcome.milliseconds) == len(questions)


def test_the_upstream_has_one_answer_for_each_intent() -> None:
    """The upstream has one answer for each of the 77 intents, and an own answer for each unrepeatable question."""
    questions = banking77("test")
    said = answers_of(questions)
    assert len(set(said)) == np.unique(questions.answers).size == 77
    assert len(set(zip(said, questions.answers.tolist(), strict=True))) == 77

    mixed = half_unrepeatable(questions)
    own = answers_of(mixed)
    assert len(set(own)) == np.unique(mixed.answers).size > 1000


def test_hindsight_is_the_best_threshold_within_the_error_limit() -> None:
    """The threshold in hindsight has the most hits of all thresholds within the limit of wrong answers."""
    chance = np.random.default_rng(3)
    answers = chance.integers(0, 8, size=200)
    vectors = chance.normal(size=(200, 16)).astype(np.float32) + 4 * np.eye(8, 16, dtype=np.float32)[answers]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    texts = tuple(f"question {place}" for place in range(200))
    stream = Stream(Questions(texts, answers), vectors)

    thresholds = hindsight(Asked("made up", list(texts), [str(a) for a in answers], stream))

    found = {each: serve_by_threshold(stream, np.arange(200), each, with_vetoes=False) for each in THRESHOLDS}
    assert 0 < found[thresholds[0]].hits < max(outcome.hits for outcome in found.values())
    assert all(outcome.wrong > MAX_WRONG or outcome.hits <= found[thresholds[0]].hits for outcome in found.values())
    assert all(found[each].wrong <= MAX_WRONG for each in thresholds)


def test_shares_are_of_requests_and_ratios_against_the_first() -> None:
    """Hits and wrong answers are shares of all requests, and ratios are against the first cache."""
    ours = Run("ours", Outcome(["a", None, None, "b"], [2.0, 2.0, 2.0, 2.0], [1.0], 1, {}), 0.25, None)
    theirs = Run(
        "theirs", Outcome([None, None, None, "b"], [6.0, 6.0, 6.0, 6.0], [4.0, 5.0, 6.0], 0, {"them": "1.2"}), 0.0, 0.9
    )

    rows = {row.what: row for row in rows_of("stream", [ours, theirs])}

    assert rows["stream, hits: ours"].measured == 0.5
    assert rows["stream, wrong: ours"].measured == 0.25
    assert rows["stream, hits: theirs"].beside == (
        {"embedding p50 ms": 5.0, "cosine similarity at least": 0.9, "them": "1.2"},
    )
    ratio = rows["stream, look-up p50: theirs against ours"]
    assert (ratio.unit, ratio.measured) == (RATIO, 3.0)


def test_missing_peers_are_named() -> None:
    """Without a peer, or RedisVL without its store, the error names the variable to set."""
    with pytest.raises(CannotMeasure, match=GPTCACHE):
        peers_of({})
    with pytest.raises(CannotMeasure, match=REDISEARCH):
        peers_of({REDISVL: "python"})
    assert [peer.name for peer in peers_of({GPTCACHE: "python"})] == ["GPTCache"]


def test_keepgate_serves_an_earlier_answer_of_the_upstream(tmp_path: Path) -> None:
    """The real cache in its own process answers a repeated question in another case, and not a new one."""
    job = Job(
        ["How do I change my card?", "Is there a fee for cash abroad?", "how do I change my card"],
        ["In the app.", "Two per cent.", "In the app."],
        "default",
        None,
        "",
    )
    source, target = tmp_path / "job.json", tmp_path / "outcome.json"
    source.write_text(json.dumps(dataclasses.asdict(job)))

    subprocess.run(
        [sys.executable, "-m", "benchmarks.semantic.peer_caches.keepgate_cache", str(source), str(target)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=120,
    )

    outcome = Outcome(**json.loads(target.read_text()))
    assert outcome.served == [None, None, "In the app."]
    assert outcome.versions.keys() >= {"keepgate"}
