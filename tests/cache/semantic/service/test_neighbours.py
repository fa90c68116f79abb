"""Which neighbour an answer is served for, and what the removal of many records takes."""

import time

from cache.semantic.index.index import VectorIndex
from cache.semantic.inspection.decisions import KEPT, Decisions, StoredQuestion
from cache.semantic.messages import LookupRequest
from cache.semantic.policy.policy import Decision
from cache.semantic.policy.threshold import ThresholdPolicy
from cache.semantic.service.neighbours import Neighbour, Neighbours, neighbourhood_of, vouched, wording_of
from cache.semantic.service.records import Record


def neighbour(entry: str, text: str, similarity: float) -> Neighbour:
    return Neighbour(Record(entry, "a.context", text, "a.1", "mock", "0.0.0", 1.0, 2.0), similarity)


def test_a_threshold_is_of_the_question_that_vouches() -> None:
    """Not of a nearer one with the same answer, which a guard refuses."""
    near = [
        neighbour("a.1", "Wie setze ich mein Passwort zurück, wenn ich es vergessen habe?", 0.95),
        neighbour("a.2", "I forgot the password of my account", 0.6),
    ]
    weighed = ThresholdPolicy(0.9).weigh(neighbourhood_of(near))._replace(members=(0, 1))
    wording = wording_of("How do I reset it when I cannot remember what it was?", near, weighed.members)
    evidence = vouched(weighed, wording, near)

    assert wording.place == 1
    assert evidence is not None
    assert (evidence.entry, evidence.similarity) == ("a.2", 0.6)
    assert not ThresholdPolicy(0.9).decide(evidence).serve


def test_nothing_vouches_where_all_are_refused() -> None:
    near = [neighbour("a.1", "How do I buy gold?", 0.95)]
    weighed = ThresholdPolicy(0.9).weigh(neighbourhood_of(near))
    assert vouched(weighed, wording_of("How do I sell gold?", near, weighed.members), near) is None


async def test_many_records_are_removed_beside_lookups() -> None:
    """Forgetting the texts of 500 removed records in all decisions takes less than a millisecond."""
    decisions = Decisions(None, shows_questions=True)
    for number in range(KEPT):
        ask, stored = (f"{tenant}.{number:032x}" for tenant in "ab")
        request = LookupRequest(ask, "a.context", "Why?", 1.0, True)
        decisions.decided(request, 1.0, Decision(True, 0.1), "", StoredQuestion(stored, "mock", "Why not?", 0.9, {}))
    neighbours = Neighbours(VectorIndex(4), removed=decisions.forget_texts)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        await neighbours.remove([f"c.{number:032x}" for number in range(500)])
        took.append(time.perf_counter() - began)
    neighbours.close()
    assert min(took) < 0.001
