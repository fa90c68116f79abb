"""Labelled pairs of prompts, as a file has them."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("text_a", "text_b", "label")
# As people write them, and as pandas does where a label of the column was missing.
_LABELS = {"1": True, "0": False, "1.0": True, "0.0": False, "true": True, "false": False}
# The longest text of a field, in characters.
_MAX_FIELD = 10_000_000
# Of what is wrong, so much is shown.
_SHOWN, _SHOWN_NAMES = 40, 8


class PairsError(Exception):
    """A file of pairs that cannot be read. The message names file, line and column, and what would be right."""


class LabelledPair(NamedTuple):
    """A cached prompt, one that is asked later, and whether the answer to the first is right for the second."""

    cached: str
    asked: str
    same: bool


def read_pairs(path: Path) -> list[LabelledPair]:
    """The pairs of a CSV file (RFC 4180) in UTF-8 with a header line: `text_a` is cached, `text_b` is asked.

    `label` is 1, 0, true or false. Columns may stand in any order, others are ignored. Raises PairsError.
    """
    records = _records(path, _text(path))
    first, header = next((record for record in records if any(map(str.strip, record[1]))), (1, []))
    if not header:
        raise PairsError(f"{path}: is empty; its first line must name the columns {', '.join(COLUMNS)}")
    places = _places(path, first, header)
    pairs = [_pair(path, line, record, places) for line, record in records if record]
    if not pairs:
        raise PairsError(f"{path}: has no pair below its header line")
    return pairs


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PairsError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise PairsError(f"{path}, line {line}: is not UTF-8; save the file as UTF-8") from error


def _records(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Each record with the number of its first line."""
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    while True:
        line = reader.line_num + 1
        try:
            record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise PairsError(f"{path}, line {line}: is no CSV: {error}; a text with quotes must be quoted") from error
        yield line, record


def _places(path: Path, line: int, header: Sequence[str]) -> tuple[int, int, int]:
    """Where in a record the three columns are."""
    names = [name.strip().casefold() for name in header]
    for column in COLUMNS:
        if names.count(column) == 0:
            there = ", ".join(name[:_SHOWN] for name in names[:_SHOWN_NAMES])
            raise PairsError(
                f"{path}, line {line}: has no column {column}; it must name {', '.join(COLUMNS)}, not {there}"
            )
        if names.count(column) > 1:
            raise PairsError(f"{path}, line {line}: names the column {column} more than once")
    cached, asked, label = (names.index(column) for column in COLUMNS)
    return cached, asked, label


def _pair(path: Path, line: int, record: list[str], places: tuple[int, int, int]) -> LabelledPair:
    for column, place in zip(COLUMNS, places, strict=True):
        if place >= len(record):
            raise PairsError(
                f"{path}, line {line}: has no column {column}; it has {len(record)} of the header's columns"
            )
    cached, asked, label = (record[place] for place in places)
    same = _LABELS.get(label.strip().casefold())
    if same is None:
        shown = label[:_SHOWN]
        raise PairsError(f"{path}, line {line}, column label: {shown!r} is no label; it must be 1, 0, true or false")
    return LabelledPair(cached, asked, same)
