"""The default judge: what it says of answers, on the real model and on labelled ones that it was not fitted to."""

import asyncio
import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.semantic.judge import Vectors, open_vectors, recall, tallies, texts_of, verdicts
from benchmarks.semantic.labelled_answers import Kind, is_held_out, labelled, pairs
from cache.semantic.judge.answer import MAX_CHARACTERS, Answer
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.judge import Verdict

_EVERY = 3


class Bags:
    """Embeds a text as the bag of its letters: quick, and alike for texts that are alike."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    async def embed(self, text: str) -> npt.NDArray[np.float32]:
        self.texts.append(text)
        counts = np.bincount([ord(letter) % 64 for letter in text], minlength=64).astype(np.float32) + 0.01
        return np.asarray(counts / np.linalg.norm(counts), dtype=np.float32)


@pytest.fixture(scope="module")
def vectors() -> Vectors:
    return open_vectors()


async def test_errors_on_held_out_answers_are_within_the_promise(vectors: Vectors) -> None:
    """Recall and false SAME verdicts are within the promise for answers that were not fitted to."""
    answers = [answer for answer in labelled() if is_held_out(answer.group)]
    some = sorted({answer.group for answer in answers})[::_EVERY]
    answers = [answer for answer in answers if answer.group in some]
    vectors.learn(texts_of(answers))
    found = pairs(answers, vectors.known)
    of = tallies(found, await verdicts(vectors, found))
    assert recall(of) >= 0.97
    for kind in (Kind.NEAR, Kind.RELATED, Kind.OTHER):
        assert of[kind].share(Verdict.SAME) <= 0.01, kind
    # A judge that says nothing would pass all of the above.
    assert of[Kind.CHAT].share(Verdict.SAME) >= 0.2
    assert of[Kind.OTHER].share(Verdict.DIFFERENT) >= 0.5


@pytest.mark.parametrize(
    ("fresh", "cached"),
    [
        ("A new card takes 5 working days to arrive.", "A new card takes 15 working days to arrive."),
        ("Yes, you can cancel at any time.", "No, you can't cancel at any time."),
        ("The capital of Australia is Canberra.", "The capital of Austria is Vienna."),
        ("Open **Settings** and turn on notifications.", "Open **Settings** and turn off notifications."),
        ("Run `git reset --soft HEAD~1`.", "Run `git reset --hard HEAD~1`."),
        ("We are open from 9 am to 5 pm.", "We are open from 9 am to 7 pm."),
        ("The fee is due before the course.", "The fee is due after the course."),
        ("Vacuum A is quieter, vacuum B is stronger.", "Vacuum B is quieter, vacuum A is stronger."),
        ("Parking is free on Sunday.", "Parking is free on Monday."),
    ],
)
async def test_a_contradiction_is_never_the_same(vectors: Vectors, fresh: str, cached: str) -> None:
    """Answers that differ in one fact are not SAME, in either order."""
    judge = EmbeddingJudge(vectors)
    assert await judge.compare("What is it?", fresh, [cached]) != [Verdict.SAME]
    assert await judge.compare("What is it?", cached, [fresh]) != [Verdict.SAME]


@pytest.mark.parametrize(
    ("question", "fresh", "cached"),
    [
        (
            "How long is the warranty?",
            "The warranty is 2 years. Please keep your receipt as proof of purchase.",
            "The warranty is two years. Please keep the receipt as your proof of purchase.",
        ),
        (
            "What is the speed of light?",
            "The speed of light in a vacuum is about 300,000 km/s.",
            "**The speed of light in a vacuum is about 300,000 km/s.**",
        ),
        ("When do you close?", "We close at 6 pm on weekdays.", "On weekdays we close at 18:00."),
    ],
)
async def test_the_same_facts_in_other_words_are_the_same(
    vectors: Vectors, question: str, fresh: str, cached: str
) -> None:
    """Answers that differ in number words, Markdown or word order are SAME."""
    assert await EmbeddingJudge(vectors).compare(question, fresh, [cached]) == [Verdict.SAME]


async def test_an_answer_to_something_else_is_different(vectors: Vectors) -> None:
    """Answers that have nothing in common are DIFFERENT."""
    fresh = "The capital of Australia is Canberra."
    other = "Boil the eggs for 10 minutes, then put them into cold water."
    judge = EmbeddingJudge(vectors)
    assert await judge.compare("What is the capital of Australia?", fresh, [other]) == [Verdict.DIFFERENT]


async def test_equal_texts_need_no_model() -> None:
    """Texts that are equal but for line ends are SAME without an embedding."""
    bags = Bags()
    long = "word " * MAX_CHARACTERS
    judge = EmbeddingJudge(bags)
    assert await judge.compare("q", long, [long + "\n"]) == [Verdict.SAME]
    assert await judge.compare("q", "if x:\n  y", ["if x:  \r\n  y"]) == [Verdict.SAME]
    assert bags.texts == []


@pytest.mark.parametrize("other", ["x" * (MAX_CHARACTERS + 1), "", " \n"])
async def test_an_answer_too_long_or_empty_is_unsure(other: str) -> None:
    """An answer that is too long or empty is UNSURE on either side."""
    judge = EmbeddingJudge(Bags())
    assert await judge.compare("q", "an answer", [other]) == [Verdict.UNSURE]
    assert await judge.compare("q", other, ["an answer"]) == [Verdict.UNSURE]


async def test_an_answer_is_embedded_once_while_it_is_kept() -> None:
    """An answer is embedded once until it is forgotten as the least recently used one."""
    bags = Bags()
    judge = EmbeddingJudge(bags, kept=3)
    await judge.compare("q", "one", ["two", "three"])
    await judge.compare("q", "one", ["two", "three"])
    assert bags.texts == ["q", "one", "two", "three", "q"]
    await judge.compare("q", "one", ["four"])
    assert bags.texts[5:] == ["q", "four"]
    await judge.compare("q", "one", ["two"])
    assert bags.texts[7:] == ["q", "two"]


async def test_a_verdict_does_not_depend_on_the_other_answers(vectors: Vectors) -> None:
    """An answer gets the same verdict alone and among others."""
    cached = ["We close at 18:00.", "We close at 7 pm.", "We close at 18:00.", "The card is free."]
    judge = EmbeddingJudge(vectors)
    alone = [(await judge.compare("When do you close?", "We close at 6 pm.", [text]))[0] for text in cached]
    assert await judge.compare("When do you close?", "We close at 6 pm.", cached) == alone


async def test_answers_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are read outside of the event loop's thread."""
    threads: list[int] = []
    read = Answer.of

    def watched(text: str) -> Answer:
        threads.append(threading.get_ident())
        return read(text)

    monkeypatch.setattr(Answer, "of", watched)
    await EmbeddingJudge(Bags()).compare("q", "one answer", ["another answer"])
    assert len(threads) == 2
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    "part", ["a ", "a. ", "** ", "```\n", "/* ", "`x", "1. ", "not ", "- a\n", "9:00 ", "x=", "if x {", "#", "'s "]
)
async def test_the_longest_texts_take_less_than_three_seconds(part: str) -> None:
    """The longest answers are compared in less than three seconds, whatever they repeat."""
    text = part * (MAX_CHARACTERS // len(part))
    began = time.process_time()
    await EmbeddingJudge(Bags()).compare("q", text, [text[:-1] + "z", "z" + text[1:]])
    assert time.process_time() - began < 3.0


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.lists(st.text(max_size=300), max_size=4))
def test_any_texts_get_verdicts(fresh: str, cached: Sequence[str]) -> None:
    """Any answers get one verdict each, and an equal one gets SAME."""
    found = asyncio.run(EmbeddingJudge(Bags()).compare("q", fresh, [*cached, fresh]))
    assert len(found) == len(cached) + 1
    assert found[-1] is Verdict.SAME


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9999), st.integers(2, 9999))
def test_another_number_is_never_the_same(one: int, other: int) -> None:
    """Answers that differ in a number only are not SAME."""
    fresh, cached = (f"Your order number is ready: you pay {number} euros at the till." for number in (one, other))
    found = asyncio.run(EmbeddingJudge(Bags()).compare("What do I pay?", fresh, [cached]))
    assert (found == [Verdict.SAME]) == (one == other)
