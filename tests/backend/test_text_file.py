"""The file of text."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from backend.errors import ModelError
from backend.text_file import read_text

TEXT = "Zwölf Boxkämpfer\njagen Viktor.\n"


@pytest.mark.parametrize(
    ("name", "content"), [("a.txt", TEXT.encode()), ("a.gz", TEXT.encode()), ("a.txt.gz", gzip.compress(TEXT.encode()))]
)
def test_text_is_read_plain_or_packed(tmp_path: Path, name: str, content: bytes) -> None:
    """Whatever its name."""
    (tmp_path / name).write_bytes(content)
    assert read_text(tmp_path / name) == TEXT


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt: empty; expected text"),
        ("blank.txt", b" \n\n ", "blank.txt: empty; expected text"),
        ("latin.txt", "fünf".encode("latin-1"), r"latin.txt: not UTF-8 text \(byte 1 is 0xfc\)"),
        ("cut.gz", gzip.compress(TEXT.encode())[:-9], "cut.gz: not a whole gzip file"),
        ("spoilt.gz", gzip.compress(TEXT.encode())[:10] + b"\xff" * 30, "spoilt.gz: not a whole gzip file"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """With what would be right."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_text(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    """Or is none."""
    with pytest.raises(ModelError, match=r"absent\.txt: cannot be read: No such file"):
        read_text(tmp_path / "absent.txt")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
