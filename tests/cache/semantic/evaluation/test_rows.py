"""Rows of CSV and JSON Lines files, and what is said of a file that has none."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.evaluation.rows import AskedQuestion, LabelledPair, UnreadableFile, read_rows

PAIRS = "text_a,text_b,label\n"
STREAM = "question,answer_id\n"


def written(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_columns_in_any_order_and_every_form_of_label_are_read(tmp_path: Path) -> None:
    """Beside others, and with a label as pandas writes it."""
    path = written(
        tmp_path,
        "pairs.csv",
        "\ufeffid,label, Text_B ,score,text_a\r\n"
        '1,1,"one, two",.9,first\r\n'
        '2,FALSE,"he said ""no""",.1,"two\nlines"\r\n'
        "\r\n"
        "3, true ,c,,Ünïcode\r\n"
        "4,0.0,d,,e\r\n",
    )
    pairs, asked = read_rows(path)
    assert asked == []
    assert pairs == [
        LabelledPair(cached="first", asked="one, two", same=True),
        LabelledPair(cached="two\nlines", asked='he said "no"', same=False),
        LabelledPair(cached="Ünïcode", asked="c", same=True),
        LabelledPair(cached="e", asked="d", same=False),
    ]


def test_a_stream_is_read_from_either_form_of_file(tmp_path: Path) -> None:
    """With names in any case and order, and a language that may be missing."""
    csv = written(tmp_path, "a.csv", 'answer_id,Question\n7,Who?\n\n8,"Why,\nand how?"\n')
    lines = written(
        tmp_path,
        "a.jsonl",
        '{"question": "Who?", "answer_id": 7, "lang": "en"}\n\n{"ANSWER_ID": true, "question": "é", "lang": null}',
    )
    assert read_rows(csv) == ([], [AskedQuestion("Who?", "7"), AskedQuestion("Why,\nand how?", "8")])
    assert read_rows(lines) == ([], [AskedQuestion("Who?", "7", "en"), AskedQuestion("é", "true")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "has no row; it must have text_a, text_b, label"),
        ("a.csv", PAIRS, "has no row"),
        ("a.csv", "text_a,text_b\na,b\n", "line 2: Object missing required field `label`; a row must have text_a"),
        ("a.csv", "text_a,label,text_b,label\na,1,b,1\n", "line 1: names the column label more than once"),
        ("a.csv", PAIRS + "a,b,1\na,b,yes\n", "line 3: Expected `bool`, got `str` - at `$.label`; a row must have"),
        ("a.csv", PAIRS + '"a\nb",b,1\na,b,\n', "line 4: Expected `bool`, got `str` - at `$.label`"),
        ("a.csv", PAIRS + "a,b\n", "line 2: Object missing required field `label`"),
        ("a.csv", PAIRS + 'a,b,1\n"a,b,1\n', "line 3: is no CSV"),
        ("a.csv", PAIRS + 'a,b,1\n"a"x,b,1\n', "line 3: is no CSV"),
        ("a.csv", PAIRS.encode() + b"a,b,1\na,\xff,1\n", "line 3: is not UTF-8"),
        ("a.csv", (PAIRS + "a,b,1\n").encode("utf-16"), "line 1: is not UTF-8"),
        ("a.csv", "question,answer_id\nWhere is my card, and why?,a1\n", "line 2: has more fields than the header"),
        ("a.csv", "\nquestion,answer_id\nWho?,1\n", "line 1: names no column"),
        ("a.csv", "question,answer\nWho?,1\n", "line 2: Object missing required field `answer_id`"),
        ("a.csv", STREAM + " ,a\n", "line 2: column question is empty"),
        ("a.csv", STREAM + "Who?, \n", "line 2: column answer_id is empty"),
        ("a.jsonl", "", "has no row"),
        ("a.jsonl", "[1]\n", "line 1: is no JSON object; each line must be one"),
        ("a.jsonl", '{"question": "Who?", "answer_id": 1}\n{"question": \n', "line 2: is no JSON: "),
        ("a.jsonl", '{"question": "Who?", "answer_id": 1}\n{"question": "Why?"}\n', "line 2: Object missing required"),
        (
            "a.jsonl",
            '{"question": ["Who?"], "answer_id": 1}\n',
            "line 1: Expected `str`, got `array` - at `$.question`",
        ),
        ("a.jsonl", '{"query": "Who?"}\n', "line 1: Object missing required field `text_a`"),
        ("a.jsonl", "[" * 100_000 + "\n", "line 1: is no JSON"),
    ],
    ids=lambda value: value[:30],
)
def test_an_invalid_file_is_refused_in_one_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    """The error names the file, the line and the column, and says what would be right."""
    path = written(tmp_path, name, content)
    with pytest.raises(UnreadableFile) as caught:
        read_rows(path)
    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path: Path) -> None:
    """The system's."""
    with pytest.raises(UnreadableFile, match="Is a directory"):
        read_rows(tmp_path)
    with pytest.raises(UnreadableFile, match="No such file"):
        read_rows(tmp_path / "none.csv")


@given(st.binary(max_size=200), st.sampled_from(["a.csv", "a.jsonl"]))
def test_any_bytes_are_rows_or_one_error(tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str) -> None:
    """No file makes the reader raise anything but its own error."""
    path = tmp_path_factory.mktemp("any") / name
    path.write_bytes(b"question,answer_id\n" + content if name == "a.csv" else content)
    with contextlib.suppress(UnreadableFile):
        assert any(read_rows(path))
