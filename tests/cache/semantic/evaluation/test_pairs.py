"""A file of labelled pairs, and what is said of one that is none."""

from pathlib import Path

import pytest

from cache.semantic.evaluation.pairs import LabelledPair, read_pairs
from cache.semantic.evaluation.rows import UnreadableFile


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "pairs.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_columns_in_any_order_and_every_form_of_label_are_read(tmp_path: Path) -> None:
    """Columns are read in any order, beside others, and with every form of label."""
    path = written(
        tmp_path,
        "\ufeffid,label, Text_B ,score,text_a\r\n"
        '1,1,"one, two",.9,first\r\n'
        '2,FALSE,"he said ""no""",.1,"two\nlines"\r\n'
        "\r\n"
        "3, true ,c,,Ünïcode\r\n",
    )
    assert read_pairs(path) == [
        LabelledPair(cached="first", asked="one, two", same=True),
        LabelledPair(cached="two\nlines", asked='he said "no"', same=False),
        LabelledPair(cached="Ünïcode", asked="c", same=True),
    ]


HEADER = "text_a,text_b,label\n"


def test_labels_are_read_as_pandas_writes_them(tmp_path: Path) -> None:
    """Labels that are written as floats are read."""
    (tmp_path / "pairs.csv").write_text(HEADER + "a,b,1.0\na,c,0.0\n", encoding="utf-8")
    assert [pair.same for pair in read_pairs(tmp_path / "pairs.csv")] == [True, False]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        (HEADER, "has no row below its header line"),
        ("text_a,text_b\na,b\n", "line 1: has no column label; it must name text_a, text_b, label, not text_a, text_b"),
        ("text_a,label,text_b,label\na,1,b,1\n", "line 1: names the column label more than once"),
        (HEADER + "a,b,1\na,b,yes\n", "line 3, column label: 'yes' is no label; it must be 1, 0, true or false"),
        (HEADER + '"a\nb",b,1\na,b,\n', "line 4, column label: '' is no label"),
        (HEADER + "a,b\n", "line 2: has no column label; it has 2 of the header's columns"),
        (HEADER + 'a,b,1\n"a,b,1\n', "line 3: is no CSV"),
        (HEADER + 'a,b,1\n"a"x,b,1\n', "line 3: is no CSV"),
        (HEADER.encode() + b"a,b,1\na,\xff,1\n", "line 3: is not UTF-8"),
        ((HEADER + "a,b,1\n").encode("utf-16"), "line 1: is not UTF-8"),
    ],
)
def test_an_invalid_file_is_refused_in_one_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    """An invalid file raises UnreadableFile with the file, the line and the column in one line."""
    path = written(tmp_path, content)
    with pytest.raises(UnreadableFile) as caught:
        read_pairs(path)
    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_opened_is_named_with_the_reason(tmp_path: Path) -> None:
    """A path that cannot be opened raises UnreadableFile with the system's reason."""
    with pytest.raises(UnreadableFile, match="Is a directory"):
        read_pairs(tmp_path)
    with pytest.raises(UnreadableFile, match="No such file"):
        read_pairs(tmp_path / "none.csv")
