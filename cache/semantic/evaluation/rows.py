"""Rows of a CSV or JSON Lines file, and what is wrong with one that cannot be read."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_JSON_LINES = (".jsonl", ".ndjson")
# The longest text of a field, in characters.
_MAX_FIELD = 10_000_000
# Of what is wrong, so much is shown.
_SHOWN, _SHOWN_NAMES = 40, 8


class UnreadableFile(Exception):
    """A file that cannot be read. The message names file, line and column, and what would be right."""


class Columns(NamedTuple):
    """The columns that a kind of file must have, and those that it may have."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.required + self.optional


class Row(NamedTuple):
    """What a line has in the columns that were asked for; an optional one that is not there is ""."""

    line: int
    values: dict[str, str]


class Rows(NamedTuple):
    """The rows of a file, of one of the kinds that were asked for: `columns`."""

    path: Path
    columns: Columns
    rows: list[Row]

    def error(self, row: Row, column: str, problem: str) -> UnreadableFile:
        """For the caller to raise: what is wrong with a value."""
        return _error(self.path, row.line, column, problem)


def shown(value: str) -> str:
    """A value as an error quotes it."""
    return repr(value[:_SHOWN])


def read_rows(path: Path, kinds: Sequence[Columns]) -> Rows:
    """The rows of a file in UTF-8, of the first of `kinds` whose columns it has; there is one at least.

    A CSV file (RFC 4180) has a header line; a file named .jsonl or .ndjson has an object in each line, whose fields are
    texts, numbers or booleans. Names are read without case, columns may stand in any order, others are ignored. Raises
    UnreadableFile.
    """
    text = _text(path)
    is_json = path.suffix.lower() in _JSON_LINES
    read = _json_lines(path, text, kinds) if is_json else _csv(path, text, kinds)
    if not read.rows:
        raise UnreadableFile(f"{path}: has no row below its header line")
    return read


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UnreadableFile(f"{path}: cannot be read: {error.strerror}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UnreadableFile(f"{path}, line {line}: is not UTF-8; save the file as UTF-8") from error


def _csv(path: Path, text: str, kinds: Sequence[Columns]) -> Rows:
    records = _records(path, text)
    line, header = next((record for record in records if any(map(str.strip, record[1]))), (1, []))
    if not header:
        raise UnreadableFile(f"{path}: is empty; its first line must name the columns {_names(kinds)}")
    names = [name.strip().casefold() for name in header]
    columns = _kind(path, line, names, kinds)
    for column in columns.all:
        if names.count(column) > 1:
            raise UnreadableFile(f"{path}, line {line}: names the column {column} more than once")
    places = {column: names.index(column) for column in columns.all if column in names}
    rows = []
    for number, record in records:
        if not record:
            continue
        for column in columns.required:
            if places[column] >= len(record):
                raise UnreadableFile(
                    f"{path}, line {number}: has no column {column}; it has {len(record)} of the header's columns"
                )
        values = {column: record[place] for column, place in places.items() if place < len(record)}
        rows.append(Row(number, dict.fromkeys(columns.optional, "") | values))
    return Rows(path, columns, rows)


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
            raise UnreadableFile(
                f"{path}, line {line}: is no CSV: {error}; a text with quotes must be quoted"
            ) from error
        yield line, record


def _json_lines(path: Path, text: str, kinds: Sequence[Columns]) -> Rows:
    columns: Columns | None = None
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UnreadableFile(f"{path}, line {number}: is no JSON: {error}; each line must be an object") from error
        if not isinstance(found, dict):
            raise UnreadableFile(f"{path}, line {number}: is no JSON object; each line must be one")
        values = {name.strip().casefold(): value for name, value in found.items()}
        columns = columns or _kind(path, number, list(values), kinds)
        for column in columns.required:
            if column not in values:
                raise UnreadableFile(f"{path}, line {number}: has no field {column}")
        read = {column: _json_value(path, number, column, values.get(column)) for column in columns.all}
        rows.append(Row(number, read))
    if columns is None:
        raise UnreadableFile(f"{path}: is empty; each line must be a JSON object with {_names(kinds)}")
    return Rows(path, columns, rows)


def _json_value(path: Path, line: int, column: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, dict)):
        raise _error(path, line, column, f"is {json.dumps(value)[:_SHOWN]}; it must be a text, a number or a boolean")
    return value if isinstance(value, str) else json.dumps(value)


def _kind(path: Path, line: int, names: Sequence[str], kinds: Sequence[Columns]) -> Columns:
    """The kind whose columns are all there, else an error about the one of which most are."""
    nearest = max(kinds, key=lambda kind: sum(column in names for column in kind.required) / len(kind.required))
    missing = [column for column in nearest.required if column not in names]
    if missing:
        there = ", ".join(name[:_SHOWN] for name in names[:_SHOWN_NAMES])
        raise UnreadableFile(
            f"{path}, line {line}: has no column {missing[0]}; it must name {_names(kinds)}, not {there}"
        )
    return nearest


def _names(kinds: Sequence[Columns]) -> str:
    return "; or ".join(", ".join(kind.required) for kind in kinds)


def _error(path: Path, line: int, column: str, problem: str) -> UnreadableFile:
    return UnreadableFile(f"{path}, line {line}, column {column}: {problem}")
