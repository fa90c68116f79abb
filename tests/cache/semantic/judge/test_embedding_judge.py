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

from benchmarks.semantic.judge import Vectors, open_vectors, scores_of, texts_of
from benchmarks.semantic.labelled_answers import COMPARED, Kind, is_held_out, labelled, pairs
from cache.semantic.judge.answer import MAX_CHARACTERS, Answer, AnswerClass, class_of
from cache.semantic.judge.embedding_judge import EmbeddingJudge
from cache.semantic.judge.fitted import SAME_ABOVE
from cache.semantic.judge.judge import MAX_SCORE

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


async def said(judge: EmbeddingJudge, question: str, fresh: str, cached: Sequence[str]) -> list[float]:
    scores = await judge.compare("m", question, fresh, cached)
    return [score for score in scores if score is not None]


async def test_errors_on_held_out_answers_are_within_the_promise(vectors: Vectors) -> None:
    """Answers that were not fitted to are recognised, and different ones seldom called the same."""
    answers = [answer for answer in labelled() if is_held_out(answer.group)]
    some = sorted({answer.group for answer in answers})[::_EVERY]
    answers = [answer for answer in answers if answer.group in some]
    vectors.learn(texts_of(answers))
    found = pairs(answers, vectors.known)
    scores = np.array(await scores_of(EmbeddingJudge(vectors.embed, kept=1 << 16), found))
    same = {kind: (scores[[pair.kind is kind for pair in found]] > SAME_ABOVE).mean() for kind in Kind}
    assert same[Kind.CHAT] >= 0.5
    for kind in COMPARED:
        assert same[kind] <= 0.02, kind  # of all groups .01: some are harder than others


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
    """Answers that differ in one fact are not the same, in either order."""
    judge = EmbeddingJudge(vectors.embed)
    for one, other in ((fresh, cached), (cached, fresh)):
        assert await said(judge, "What is it?", one, [other]) <= [SAME_ABOVE]


@pytest.mark.parametrize(
    ("question", "fresh", "cached"),
    [
        (
            "How do I turn on notifications?",
            "To turn on notifications, open **Settings** > **Notifications** and switch on **Push notifications**. "
            "Your phone may ask you to allow them.",
            "You can enable push notifications in **Settings** > **Notifications** by turning on **Push "
            "notifications**. If your phone asks for permission, tap **Allow**.",
        ),
        (
            "What is the speed of light?",
            "The speed of light in a vacuum is about 300,000 km/s.",
            "**The speed of light in a vacuum is about 300,000 km/s.**",
        ),
        (
            "Which city is Australia's capital?",
            "Australia's capital city is Canberra.",
            "The capital city of Australia is Canberra. It is located in the Australian Capital Territory.",
        ),
    ],
)
async def test_the_same_facts_in_other_words_are_the_same(
    vectors: Vectors, question: str, fresh: str, cached: str
) -> None:
    """Answers that differ in Markdown or in most of their words are the same."""
    assert await said(EmbeddingJudge(vectors.embed), question, fresh, [cached]) > [SAME_ABOVE]


async def test_a_negation_more_is_evidence_against(vectors: Vectors) -> None:
    """Of two wordings as far from an answer, that which denies it scores lower."""
    judge = EmbeddingJudge(vectors.embed)
    fresh = "Eat and drink as you like before the test, and take your medicines as usual."
    same = "Before the blood test you can eat, drink and take all your usual medicines."
    other = "Before the blood test you must not eat, not drink and never take your usual medicines."
    one, two = [(await said(judge, "What about my blood test?", fresh, [text]))[0] for text in (same, other)]
    assert one > two + 1.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("You can't, and never could.", 2),
        ("Nein, nicht ohne Karte.", 2),
        ("Na\u0303o, sem cart\u00e3o.", 2),
        ("Yes.", 0),
    ],
)
def test_negations_are_counted_in_several_languages(text: str, count: int) -> None:
    """Contractions and letters written as two signs count as well."""
    assert Answer.of(text).negations == count


async def test_an_answer_to_something_else_is_different(vectors: Vectors) -> None:
    """Answers that have nothing in common are far from the same."""
    fresh = "The capital of Australia is Canberra."
    other = "Boil the eggs for 10 minutes, then put them into cold water."
    judge = EmbeddingJudge(vectors.embed)
    assert await said(judge, "What is the capital of Australia?", fresh, [other]) < [-5.0]


async def test_equal_texts_need_no_model() -> None:
    """Texts that are equal but for line ends are the same without an embedding."""
    bags = Bags()
    long = "word " * MAX_CHARACTERS
    judge = EmbeddingJudge(bags.embed)
    assert await said(judge, "q", long, [long + "\n"]) == [MAX_SCORE]
    assert await said(judge, "q", "if x:\n  y", ["if x:  \r\n  y"]) == [MAX_SCORE]
    assert bags.texts == []


@pytest.mark.parametrize("other", ["x" * (MAX_CHARACTERS + 1), "", " \n"])
async def test_an_answer_too_long_or_empty_is_no_other(other: str) -> None:
    """An answer that is too long or empty is the same as no other one."""
    judge = EmbeddingJudge(Bags().embed)
    assert await said(judge, "q", "an answer", [other]) == [-MAX_SCORE]
    assert await said(judge, "q", other, ["an answer"]) == [-MAX_SCORE]


async def test_an_answer_is_embedded_once_while_it_is_kept() -> None:
    """An answer is embedded once until it is forgotten as the least recently used one."""
    bags = Bags()
    judge = EmbeddingJudge(bags.embed, kept=3)
    await said(judge, "q", "one", ["two", "three"])
    await said(judge, "q", "one", ["two", "three"])
    assert bags.texts == ["one", "two", "three"]
    await said(judge, "q", "one", ["four"])
    assert bags.texts[3:] == ["four"]
    await said(judge, "q", "one", ["two"])
    assert bags.texts[4:] == ["two"]


async def test_a_verdict_does_not_depend_on_the_other_answers(vectors: Vectors) -> None:
    """An answer gets the same verdict alone and among others."""
    cached = ["We close at 18:00.", "We close at 7 pm.", "We close at 18:00.", "The card is free."]
    judge = EmbeddingJudge(vectors.embed)
    alone = [(await said(judge, "When do you close?", "We close at 6 pm.", [text]))[0] for text in cached]
    assert await said(judge, "When do you close?", "We close at 6 pm.", cached) == alone


async def test_answers_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are read outside of the event loop's thread."""
    threads: list[int] = []
    read = Answer.of

    def watched(text: str) -> Answer:
        threads.append(threading.get_ident())
        return read(text)

    monkeypatch.setattr(Answer, "of", watched)
    await EmbeddingJudge(Bags().embed).compare("m", "q", "one answer", ["another answer"])
    assert len(threads) == 3
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    "part", ["a ", "a. ", "** ", "```\n", "/* ", "`x", "1. ", "not ", "- a\n", "9:00 ", "x=", "if x {", "#", "'s "]
)
async def test_the_longest_texts_take_less_than_three_seconds(part: str) -> None:
    """The longest answers are compared in less than three seconds, whatever they repeat."""
    text = part * (MAX_CHARACTERS // len(part))
    began = time.process_time()
    await EmbeddingJudge(Bags().embed).compare("m", "q", text, [text[:-1] + "z", "z" + text[1:]])
    assert time.process_time() - began < 3.0


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=300), st.lists(st.text(max_size=300), max_size=4))
def test_any_texts_get_scores(fresh: str, cached: Sequence[str]) -> None:
    """Any answers get one score each, and an equal one the highest."""
    found = asyncio.run(EmbeddingJudge(Bags().embed).compare("m", "q", fresh, [*cached, fresh]))
    assert len(found) == len(cached) + 1
    assert found[-1] == MAX_SCORE
    assert all(score is not None and abs(score) <= MAX_SCORE for score in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9999), st.integers(2, 9999))
def test_another_number_is_never_the_same(one: int, other: int) -> None:
    """Answers that differ in a number only say something else."""
    fresh, cached = (f"Your order number is ready: you pay {number} euros at the till." for number in (one, other))
    found = asyncio.run(EmbeddingJudge(Bags().embed).compare("m", "What do I pay?", fresh, [cached]))
    assert found == [MAX_SCORE if one == other else -MAX_SCORE]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris.", "short"),
        ("Paris is the capital of France. " * 10, "prose"),
        ("Two steps:\n\n1. Open the app.\n2. Choose **Cancel**.", "structured"),
        ('{\n  "city": "Paris"\n}', "structured"),
        ("Run:\n```sh\ngit reset --soft HEAD~1\n```", "code"),
        ("", "short"),
    ],
)
def test_an_answer_has_a_class(text: str, expected: AnswerClass) -> None:
    """Code in a fence, lists and JSON, short texts, and the rest."""
    assert class_of(text) == expected
