"""The rows of a CSV or JSON Lines file, and what is wrong with one that cannot be read."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_MAX_FIELD = 10_000_000
"""Characters of a text."""
_SURPLUS = "\n"
"""The name of the fields of a record beyond its header, which no column can have."""
_COLUMNS = "text_a, text_b, label (1, 0, true or false); or question, answer_id and maybe lang"

T = TypeVar("T", bound=msgspec.Struct)
Row = tuple[int, dict[str, Any]]
"""The number of a line, and what it has by the names of columns."""


class UnreadableFile(Exception):
    """A file that cannot be read. The message names file, line and column, and what would be right."""


class LabelledPair(msgspec.Struct, frozen=True, rename={"cached": "text_a", "asked": "text_b", "same": "label"}):
    """A cached prompt, one that is asked later, and whether the answer to the first is right for the second."""

    cached: str
    asked: str
    same: bool


class AskedQuestion(
    msgspec.Struct, frozen=True, rename={"text": "question", "answer": "answer_id", "language": "lang"}
):
    """A question, the name of the answer that is right for it, and its language, "" where the file says none."""

    text: str
    answer: str
    language: str = ""

    def __post_init__(self) -> None:
        for column, value in (("question", self.text), ("answer_id", self.answer)):
            if not value.strip():
                raise ValueError(f"column {column} is empty")


def read_rows(path: Path) -> tuple[list[LabelledPair], list[AskedQuestion]]:
    """The rows of a file in UTF-8, of pairs or of a stream of questions; there is one at least of either.

    A CSV file (RFC 4180) has a header line; a file named .jsonl or .ndjson has an object in each line, whose fields are
    texts, numbers or booleans. Names are read without case, columns may stand in any order, others are ignored. Raises
    UnreadableFile.
    """
    text = _text(path)
    rows = list(_json_lines(path, text) if path.suffix.lower() in (".jsonl", ".ndjson") else _csv_records(path, text))
    if not rows:
        raise UnreadableFile(f"{path}: has no row; it must have {_COLUMNS}")
    if "question" in rows[0][1]:
        return [], [_converted(path, row, AskedQuestion) for row in rows]
    return [_converted(path, row, LabelledPair) for row in rows], []


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise UnreadableFile(f"{path}, line {line}: is not UTF-8; save the file as UTF-8") from error


def _csv_records(path: Path, text: str) -> Iterator[Row]:
    """Each record with the number of its last line."""
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey=_SURPLUS, strict=True)
    try:
        reader.fieldnames = names = [name.strip().casefold() for name in reader.fieldnames or ()]
        if text and not any(names):
            raise UnreadableFile(f"{path}, line 1: names no column; a row must have {_COLUMNS}")
        for name in ("question", "answer_id", "lang", "text_a", "text_b", "label"):
            if names.count(name) > 1:
                raise UnreadableFile(f"{path}, line 1: names the column {name} more than once")
        for record in reader:
            if any(record.get(_SURPLUS, ())):
                reason = "has more fields than the header; a text with commas must be quoted"
                raise UnreadableFile(f"{path}, line {reader.line_num}: {reason}")
            yield reader.line_num, record
    except csv.Error as error:
        reason = f"is no CSV: {error}; a text with quotes must be quoted"
        raise UnreadableFile(f"{path}, line {reader.reader.line_num}: {reason}") from error


def _json_lines(path: Path, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableFile(f"{path}, line {number}: is no JSON: {error}; each line must be an object") from error
        if not isinstance(found, dict):
            raise UnreadableFile(f"{path}, line {number}: is no JSON object; each line must be one")
        yield number, {name.strip().casefold(): value for name, value in found.items()}


def _converted(path: Path, row: Row, kind: type[T]) -> T:
    line, found = row
    values = {
        name: json.dumps(value) if isinstance(value, (int, float)) else value
        for name, value in found.items()
        if value is not None
    }
    if isinstance(label := values.get("label"), str):
        values["label"] = label.strip().removesuffix(".0")  # as pandas writes it where a label was missing
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UnreadableFile(f"{path}, line {line}: {error}; a row must have {_COLUMNS}") from error
