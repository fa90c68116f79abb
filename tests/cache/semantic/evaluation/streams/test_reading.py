"""A stream of questions, as a file has it."""

from pathlib import Path

import pytest

from cache.semantic.evaluation.rows import UnreadableFile, read_rows
from cache.semantic.evaluation.streams.reading import COLUMNS, AskedQuestion, Repeats, stream_of, without_repeats


def stream(folder: Path, content: str) -> list[AskedQuestion]:
    path = folder / "log.csv"
    path.write_text(content, encoding="utf-8")
    return stream_of(read_rows(path, [COLUMNS]))


def test_questions_stand_in_their_order(tmp_path: Path) -> None:
    """With the name of their answer and their language."""
    assert stream(tmp_path, "question,answer_id,lang\nWho?,a, en\n Why? , b ,\n") == [
        AskedQuestion("Who?", "a", "en"),
        AskedQuestion(" Why? ", "b", ""),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [(" ,a", "line 2, column question: is empty"), ("Who?, ", "line 2, column answer_id: is empty")],
)
def test_an_empty_value_is_refused(tmp_path: Path, row: str, message: str) -> None:
    """With its line and column."""
    with pytest.raises(UnreadableFile, match=message):
        stream(tmp_path, f"question,answer_id\n{row}\n")


def test_repeats_never_reach_the_semantic_cache() -> None:
    """What has the same words or the same normal form is answered without it, even if it wants another answer."""
    asked = [
        AskedQuestion(text, answer, "")
        for text, answer in [
            ("Who is it?", "a"),
            ("who is it", "a"),
            ("f(x)  = 1", "b"),
            ("f(x) = 1", "b"),
            ("Who is it?", "c"),
        ]
    ]
    once, repeats = without_repeats(asked)
    assert [question.text for question in once] == ["Who is it?", "f(x)  = 1", "f(x) = 1"]
    assert repeats == Repeats(2, 1)
