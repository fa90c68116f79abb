"""Rows of CSV and JSON Lines files, and what is said of a file that has none."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.evaluation.rows import Columns, UnreadableFile, read_rows

PAIRS = Columns(("text_a", "text_b"))
STREAM = Columns(("question", "answer_id"), ("lang",))


def written(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


def test_a_file_is_of_the_kind_whose_columns_it_has(tmp_path: Path) -> None:
    """Both forms of file, with names in any case and order, and an optional column that may be missing."""
    csv = written(tmp_path, "a.csv", 'answer_id,Question\n7,Who?\n\n8,"Why,\nand how?"\n')
    lines = written(
        tmp_path,
        "a.jsonl",
        '{"question": "Who?", "answer_id": 7, "lang": "en"}\n\n{"ANSWER_ID": true, "question": "é"}',
    )
    pairs = written(tmp_path, "b.csv", "text_a,text_b\nx,y\n")
    read = read_rows(csv, [PAIRS, STREAM])
    assert read.columns == STREAM
    assert [(row.line, row.values) for row in read.rows] == [
        (2, {"question": "Who?", "answer_id": "7", "lang": ""}),
        (4, {"question": "Why,\nand how?", "answer_id": "8", "lang": ""}),
    ]
    assert [(row.line, row.values) for row in read_rows(lines, [PAIRS, STREAM]).rows] == [
        (1, {"question": "Who?", "answer_id": "7", "lang": "en"}),
        (3, {"question": "é", "answer_id": "true", "lang": ""}),
    ]
    assert read_rows(pairs, [PAIRS, STREAM]).columns == PAIRS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "question,answer\nWho?,1\n",
            "line 1: has no column answer_id; it must name text_a, text_b; or question, answer_id, not question, ans",
        ),
        ("a.csv", "question,answer_id\nWho?\n", "line 2: has no column answer_id; it has 1 of the header's columns"),
        ("a.csv", "question,answer_id\n", "has no row"),
        ("a.csv", "", "is empty"),
        ("a.jsonl", "", "is empty; each line must be a JSON object with text_a, text_b; or question, answer_id"),
        ("a.jsonl", "[1]\n", "line 1: is no JSON object; each line must be one"),
        ("a.jsonl", '{"question": "Who?", "answer_id": 1}\n{"question": \n', "line 2: is no JSON: "),
        ("a.jsonl", '{"question": "Who?", "answer_id": 1}\n{"question": "Why?"}\n', "line 2: has no field answer_id"),
        (
            "a.jsonl",
            '{"question": ["Who?"], "answer_id": 1}\n',
            'line 1, column question: is ["Who?"]; it must be a text',
        ),
        ("a.jsonl", '{"query": "Who?"}\n', "line 1: has no column"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1: is no JSON"),
    ],
    ids=lambda value: value[:30],
)
def test_an_invalid_file_is_refused_in_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    """The error names the file, the line and the column, and says what would be right."""
    path = written(tmp_path, name, content)
    with pytest.raises(UnreadableFile) as caught:
        read_rows(path, [PAIRS, STREAM])
    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200), st.sampled_from(["a.csv", "a.jsonl"]))
def test_any_bytes_are_rows_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str) -> None:
    """No file makes the reader raise anything but its own error."""
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(b"question,answer_id\n" + content if name == "a.csv" else content)
    with contextlib.suppress(UnreadableFile):
        assert read_rows(path, [PAIRS, STREAM]).rows
