"""The report on a stream of real questions, of which the answers are known."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.semantic.intent_data import banking77
from cache.semantic.embedding.encoder import Encoder, vectors_of
from cache.semantic.evaluation.rows import AskedQuestion
from cache.semantic.evaluation.simulation import Questions, Stream, StreamJudge, serve_in_budget
from cache.semantic.evaluation.stream_report import format_stream_report, report_on_stream, without_repeats
from cache.semantic.policy.policy import JudgeError

DELTA = 0.05
JUDGE = JudgeError(0.98, 0.01)


@pytest.fixture(scope="module")
def asked() -> list[AskedQuestion]:
    """480 questions of twelve intents of Banking77 in random order, and one of them twice."""
    banking = banking77("test")
    chosen = np.flatnonzero(banking.answers < 12)
    order = np.random.default_rng(4).permutation(chosen).tolist()
    stream = [AskedQuestion(banking.texts[n], str(banking.answers[n]), "en" if n % 2 else "") for n in order]
    return [*stream, stream[0]]


def report(encoder: Encoder, asked: list[AskedQuestion]) -> dict[str, Any]:
    return report_on_stream(asked, encoder, lambda done: None, DELTA, JUDGE)


def test_the_figures_are_those_of_the_simulation(minilm: Encoder, asked: list[AskedQuestion]) -> None:
    """It is what the benchmarks do."""
    last = report(minilm, asked)["checkpoints"][-1]
    texts = [question.text for question in asked[:-1]]
    numbers = np.array([int(question.answer) for question in asked[:-1]])
    stream = Stream(Questions(tuple(texts), numbers), vectors_of(texts, minilm))
    end = serve_in_budget(stream, np.arange(480), 0, DELTA, StreamJudge("errs", JUDGE)).end
    assert (last["asked"], last["hits"], last["wrong"]) == (480, end.outcome.hits, end.outcome.wrong)
    assert last["bound"] == end.upper


def test_hits_grow_and_stay_within_the_budget(minilm: Encoder, asked: list[AskedQuestion]) -> None:
    """In the order of the file: nothing at first, then more and more, with few wrong answers."""
    found = report(minilm, asked)
    assert (found["requests"], found["repeats"], found["repeats_with_other_answers"]) == (481, 1, 0)
    assert (found["asked"], found["answers"]) == (480, 12)
    points = found["checkpoints"]
    assert [point["asked"] for point in points] == [48 * tenth for tenth in range(1, 11)]
    assert points[0]["hits"] == 0.0
    assert points[-1]["hits"] > 0.1
    assert points[-1]["wrong"] <= DELTA
    # Shares of all until then, and of those since the last point.
    hits = [point["hits"] * point["asked"] for point in points]
    assert np.diff([0.0, *hits]) == pytest.approx([48 * point["latest_hits"] for point in points])
    languages = found["languages"]
    assert sum(each["asked"] for each in languages.values()) == 480
    assert sum(each["asked"] * each["hits"] for each in languages.values()) == pytest.approx(hits[-1])
    assert found["static"]["0.80"]["hits"] > found["static"]["0.98"]["hits"]
    assert json.loads(json.dumps(found)) == found


def test_the_table_names_its_columns(minilm: Encoder, asked: list[AskedQuestion]) -> None:
    """And says where nothing is served, and which questions want two answers."""
    few = [*asked[:20], msgspec.structs.replace(asked[0], answer="another")]
    text = format_stream_report(report(minilm, few))
    for words in (
        "latest    hits   wrong  audits   bound",
        "by language",
        "Nothing is served",
        "1 of the repeated questions",
    ):
        assert words in text
    assert max(map(len, text.splitlines())) <= 130


def test_one_question_is_a_stream(minilm: Encoder) -> None:
    """Of which nothing can be served."""
    found = report(minilm, [AskedQuestion("Who?", "a", "")])
    assert [point["asked"] for point in found["checkpoints"]] == [1]
    assert found["checkpoints"][0]["hits"] == 0.0
    assert found["languages"] == {}


def test_repeats_never_reach_the_semantic_cache() -> None:
    """What has the same words or the same normal form is answered without it, even if it wants another answer."""
    asked = [
        AskedQuestion(text, answer)
        for text, answer in [
            ("Who is it?", "a"),
            ("who is it", "a"),
            ("f(x)  = 1", "b"),
            ("f(x) = 1", "b"),
            ("Who is it?", "c"),
        ]
    ]
    once, others = without_repeats(asked)
    assert [question.text for question in once] == ["Who is it?", "f(x)  = 1", "f(x) = 1"]
    assert others == 1
