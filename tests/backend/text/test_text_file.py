"""Text files for calibration and evaluation are read plain or compressed, within a size limit."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backend.errors import ModelError
from backend.text import text_file
from backend.text.text_file import MAX_BYTES, read_text

TEXT = "Zwölf Boxkämpfer\njagen Viktor.\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.txt", TEXT.encode()), ("a.gz", TEXT.encode()), ("a.txt.gz", gzip.compress(TEXT.encode(), mtime=0))],
)
def test_text_is_read_plain_or_packed(tmp_path: Path, name: str, content: bytes) -> None:
    """Text is read plain or as gzip, whatever the file's name."""
    (tmp_path / name).write_bytes(content)
    assert read_text(tmp_path / name) == TEXT


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "empty.txt: empty; expected text"),
        ("blank.txt", b" \n\n ", "blank.txt: empty; expected text"),
        ("latin.txt", "fünf".encode("latin-1"), r"latin.txt: not UTF-8 text \(byte 1 is 0xfc\)"),
        ("cut.gz", gzip.compress(TEXT.encode(), mtime=0)[:-9], "cut.gz: not a whole gzip file"),
        ("spoilt.gz", gzip.compress(TEXT.encode(), mtime=0)[:10] + b"\xff" * 30, "spoilt.gz: not a whole gzip file"),
    ],
)
def test_files_without_valid_text_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """A file that is empty, not UTF-8 or a broken gzip file is refused with what would be right."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_text(tmp_path / name)


def test_absent_files_and_directories_are_refused(tmp_path: Path) -> None:
    """An absent file and a directory are refused with their names."""
    with pytest.raises(ModelError, match=r"absent\.txt: cannot be read: No such file"):
        read_text(tmp_path / "absent.txt")
    with pytest.raises(ModelError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    """A pipe is refused without waiting for its writer, and a device without reading it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ModelError, match=f"{path}: cannot be read: not a regular file"):
            read_text(path)


def test_a_text_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text over the size limit is refused, plain and compressed."""
    monkeypatch.setattr(text_file, "MAX_BYTES", 2**20)
    for content in (b"a" * 2**20, gzip.compress(b"a" * 2**20)):
        (tmp_path / "text").write_bytes(content)
        assert len(read_text(tmp_path / "text")) == 2**20
    for content in (b"a" * (2**20 + 1), gzip.compress(b"a" * (2**20 + 1))):
        (tmp_path / "text").write_bytes(content)
        with pytest.raises(ModelError, match="text: too large; expected a text of at most 1 MiB, unpacked"):
            read_text(tmp_path / "text")


def test_a_gzip_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """A gzip bomb is refused with memory up to the limit, and one line says when there is less memory."""
    bomb = tmp_path / "bomb.gz"
    # A gzip file may have several members: one is compressed, and repeated until it is past the bound.
    member = gzip.compress(bytes(2**24), compresslevel=1)
    bomb.write_bytes(member * (MAX_BYTES // 2**24 + 1))
    assert bomb.stat().st_size < MAX_BYTES // 16
    script = (
        "import resource, sys; from pathlib import Path; from backend.errors import ModelError\n"
        "from backend.text.text_file import read_text\n"
        "resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)\n"
        "try: read_text(Path(sys.argv[1]))\n"
        "except ModelError as error: print(error)"
    )
    limits = ((4 * MAX_BYTES, "too large; expected a text of at most 256 MiB"), (MAX_BYTES // 2, "not enough memory"))
    for limit, message in limits:
        words = [sys.executable, "-c", script, str(bomb), str(limit)]
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        assert message in ended.stdout
        assert ended.stderr == ""
