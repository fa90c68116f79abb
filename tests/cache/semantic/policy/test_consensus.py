"""Several questions with one answer show what is wording, and nothing else."""

import csv
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.guards import refusal
from cache.semantic.language.text import Text
from cache.semantic.policy.consensus import MIN_QUESTIONS, matching_question
from tests.cache.semantic.trap_pairs import DATA

PIN = ["How do I reset my PIN?", "Where can I change the PIN?", "I forgot my PIN", "How can I get a new PIN?"]


def vouched(asked: str, questions: Sequence[str]) -> tuple[int | None, str]:
    return matching_question(Text.of(asked), [Text.of(question) for question in questions])


def test_words_that_the_questions_used_are_wording() -> None:
    """No single question passes the guards, but together they have said it all."""
    asked = "Where do I get a new PIN if I forgot it?"
    assert all(vouched(asked, [question])[0] is None for question in PIN)
    place, refused = vouched(asked, PIN)
    assert place is not None
    assert refused == ""


@pytest.mark.parametrize(
    "asked",
    [
        "Where do I get a new password if I forgot it?",  # a word that nobody used
        "Where can I change it?",  # not about a PIN
        "Where do I get 2 new PINs if I forgot one?",  # a number
        "Why did I not forget my PIN?",  # denied, and another type of question
    ],
)
def test_nothing_else_is_wording(asked: str) -> None:
    place, refused = vouched(asked, PIN)
    assert place is None
    assert refused


def test_three_questions_are_taken_together() -> None:
    """Two may both be exceptions."""
    asked = "Where do I get a new PIN if I forgot it?"
    enough = [PIN[2], PIN[1], PIN[3]]
    assert vouched(asked, enough)[0] is not None
    assert MIN_QUESTIONS == 3
    assert vouched(asked, enough[:2])[0] is None


OPPOSITES = [
    ("How do I place an order?", ["How do I cancel an order I placed?", "How do I cancel my order?"]),
    ("How do I get a new card?", ["How do I freeze a card after I get a new phone?", "How do I freeze my card?"]),
    ("How do I open an account?", ["How do I close an account that I opened?", "How do I close my account?"]),
    ("How do I add a phone number?", ["How do I remove a phone number that I added?", "How do I remove my number?"]),
    ("How do I book a flight?", ["How do I get a refund for a flight I booked?", "How do I get a flight refund?"]),
    ("How do I send money abroad?", ["Why was I charged a fee when I send money abroad?", "Why was I charged a fee?"]),
    ("Can I use my card abroad?", ["What is the fee if I use my card abroad?", "What fee does my card have abroad?"]),
    ("How do I buy a ticket?", ["How do I return a ticket that I bought?", "How do I return my ticket?"]),
]


@pytest.mark.parametrize(("asked", "questions"), OPPOSITES)
def test_a_part_of_what_one_of_them_said_is_another_question(asked: str, questions: list[str]) -> None:
    """Each word was used, even together; what all of the questions ask about is missing."""
    for size in (2, 3, 5):
        assert vouched(asked, questions[:1] + questions[1:] * (size - 1))[0] is None


def test_questions_that_only_share_their_answer_are_not_taken_together() -> None:
    """All are answered by "yes", and every word is known; what they ask for is not."""
    questions = ["Is a whale a mammal?", "Is a cat a mammal?", "Is a dog a pet?", "Is a hamster a pet?"]
    assert vouched("Is a whale a pet?", questions)[0] is None


def test_the_first_whom_no_guard_refuses_vouches() -> None:
    """As the neighbours are sorted, that is the nearest."""
    assert vouched("How do I reset my PIN?", ["I lost my card", PIN[0], PIN[0]]) == (1, "")


WRAPPERS = ("{}", "Hi, {}", "{} Thanks!", "Please tell me: {}", "I have a question. {}", "Quick question: {}", "So, {}")


def test_no_trap_is_served_in_a_dense_neighbourhood() -> None:
    """Questions that ask the seed in many ways match none of the questions that only look like it."""
    with (DATA / "finance_adversarial_pairs.csv").open(encoding="utf-8", newline="") as file:
        pairs = [(row["seed"], row["probe"]) for row in csv.DictReader(file) if row["should_hit"] == "0"]
    assert len(pairs) >= 30
    served = [probe for seed, probe in pairs if vouched(probe, [form.format(seed) for form in WRAPPERS])[0] is not None]
    assert not served
    known = [seed for seed, _ in pairs if vouched(seed, [form.format(seed) for form in WRAPPERS])[0] is not None]
    assert len(known) == len(pairs)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([*PIN, "I lost my card", "Is my card lost?", "Order 2 cards", ""]), max_size=6))
def test_whoever_passes_alone_passes_in_a_crowd(questions: list[str]) -> None:
    """Several questions never refuse what one of them would answer, and names a guard where it refuses."""
    for asked in (*PIN, "Order 3 cards"):
        place, refused = vouched(asked, questions)
        alone = [refusal(Text.of(asked), Text.of(question)) is None for question in questions]
        if any(alone):
            assert place == alone.index(True)
        assert bool(refused) == (place is None and bool(questions))
