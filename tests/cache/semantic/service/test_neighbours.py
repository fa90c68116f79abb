"""Which neighbour an answer is served for, and how many records come and go beside lookups."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import numpy as np

from cache.semantic.embedding.encoder import Vector
from cache.semantic.index.index import VectorIndex
from cache.semantic.index.partition import Thresholds
from cache.semantic.inspection.decisions import KEPT, Decisions
from cache.semantic.messages import LookupRequest, SemanticDecision
from cache.semantic.normal_form.english import load as load_words
from cache.semantic.policy.policy import Decision, ThresholdPolicy
from cache.semantic.service.neighbours import Candidate, Neighbour, Neighbours, candidate_of
from cache.semantic.service.records import Record


def neighbour(entry: str, text: str, similarity: float) -> Neighbour:
    return Neighbour(Record(entry, "a.context", text, "a.1", "mock", "0.0.0", 1.0, 2.0), similarity)


def test_a_threshold_is_of_the_question_that_vouches() -> None:
    """Not of a nearer one with the same answer, which has a veto."""
    near = [
        neighbour("a.1", "Wie setze ich mein Passwort zurück, wenn ich es vergessen habe?", 0.95),
        neighbour("a.2", "I forgot the password of my account", 0.6),
    ]
    evidence = ThresholdPolicy(0.9).vote([("a.1", 0.95), ("a.1", 0.6)])._replace(members=(0, 1))
    found = candidate_of("How do I reset it when I cannot remember what it was?", near, evidence)

    assert (found.neighbour, found.veto, found.vetoes) == (near[1], "", ("language", ""))
    assert found.evidence.similarity == 0.6
    assert not ThresholdPolicy(0.9).decide(found.evidence).serve


def test_a_veto_is_told_of_a_question_with_the_answer() -> None:
    """Not of a nearer one with another answer, which has no part in it."""
    near = [neighbour("a.1", "How is gold mined?", 0.96), neighbour("a.2", "How do I buy gold?", 0.95)]
    evidence = ThresholdPolicy(0.9).vote([("a.1", 0.96), ("a.1", 0.95)])._replace(members=(1,))
    assert candidate_of("How do I sell gold?", near, evidence) == Candidate(near[1], evidence, "words", ("words",))


async def longest_turn(work: Coroutine[Any, Any, None]) -> float:
    """The longest processor time, in seconds, for which the work keeps all others from the event loop."""
    task, longest, before = asyncio.create_task(work), 0.0, time.thread_time()
    while not task.done():
        await asyncio.sleep(0)
        longest, before = max(longest, time.thread_time() - before), time.thread_time()
    await task
    return longest


async def test_many_records_come_and_go_beside_lookups() -> None:
    """A page of records, as it is read at the start, is taken over and removed some at a time."""
    load_words()  # as the process does when it starts
    neighbours = Neighbours(VectorIndex(4))
    text = "How do I reset the password of my account at the bank, number {}?"
    page: list[tuple[Record, Vector | None]] = [
        (
            Record(f"a.{number}", "a.context", text.format(number), "a.1", "mock", "0.0.0", 1.0, 2.0),
            np.eye(1, 4, dtype="f4")[0],
        )
        for number in range(500)
    ]
    assert await longest_turn(neighbours.put(page)) < 0.01
    assert len(neighbours.records) == len(neighbours.index) == 500
    assert await longest_turn(neighbours.bound(500)) < 0.01
    assert len(neighbours.records) == len(neighbours.index) == 0
    neighbours.close()


async def test_a_long_search_is_no_turn_of_the_event_loop() -> None:
    """Of a partition without lists, as it is while they are made, every entry is compared: beside other lookups."""
    index = VectorIndex(384, Thresholds(flat=15_000))
    vectors = np.random.default_rng(0).standard_normal((15_000, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for number, vector in enumerate(vectors):
        index.add("a.context", f"a.{number}", vector, 2e9)
    neighbours = Neighbours(index)

    async def search() -> None:
        await neighbours.near("a.context", vectors[0])

    assert min([await longest_turn(search()) for _ in range(5)]) < 0.001
    neighbours.close()


async def test_many_records_are_removed_beside_lookups() -> None:
    """Forgetting the texts of 500 removed records in all decisions takes about as long as those of five."""
    decisions = Decisions(None, shows_questions=True)
    for number in range(KEPT):
        ask, stored = (f"{tenant}.{number:032x}" for tenant in "ab")
        request = LookupRequest("a.context", "Why?", 1.0, key=ask, serve=True)
        decision = Decision(True, 0.1)
        shown = SemanticDecision(
            id=0,
            time=0.0,
            key=ask,
            namespace="a",
            entry=stored,
            model="mock",
            similarity=0.9,
            veto="",
            features=(),
            risk=0.1,
            limit=None,
            max_risk=1.0,
            threshold=None,
            outcome="served",
            reason="",
            audit=False,
            question="Why?",
            stored_question="Why not?",
        )
        decisions.add(request, decision, 1.0, shown)
    neighbours = Neighbours(VectorIndex(4), removed=decisions.forget_texts)

    async def took(count: int) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            await neighbours.remove([f"c.{number:032x}" for number in range(count)])
            times.append(time.perf_counter() - began)
        return min(times)

    assert await took(500) < 20 * await took(5)
    neighbours.close()
