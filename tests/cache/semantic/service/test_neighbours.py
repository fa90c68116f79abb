"""Which neighbour an answer is served for."""

from cache.semantic.policy.threshold import ThresholdPolicy
from cache.semantic.service.neighbours import Neighbour, neighbourhood_of, vouched, wording_of
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
