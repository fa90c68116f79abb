"""Azure's traces: CSV with arrival time and lengths, without shared prefixes.

Patel et al., "Splitwise: Efficient Generative LLM Inference Using Phase Splitting", ISCA '24.
"""

import csv
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from prefix_store.replay.lines import BadLine, parse_lines
from prefix_store.replay.trace import Trace, TraceError, TraceRequest

BLOCK_TOKENS = 16
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class _Reader:
    def __init__(self, columns: list[str]) -> None:
        self._count = len(columns)
        self._places = [columns.index(name) for name in COLUMNS]

    def parse(self, text: str) -> TraceRequest:
        fields = next(csv.reader([text]))
        if len(fields) != self._count:
            raise BadLine(f"has {len(fields)} fields, the header {self._count}")
        time, *lengths = (fields[place].strip() for place in self._places)
        tokens = []
        for name, value in zip(COLUMNS[1:], lengths, strict=True):
            if not (value.isascii() and value.isdigit()):
                raise BadLine(f"{name} is {value!r}, expected a number of tokens")
            tokens.append(int(value))
        return TraceRequest(_seconds(time), tokens[0], tokens[1], ())


def _seconds(text: str) -> float:
    # The files have seven decimals of a second, Python reads six.
    try:
        found = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text))
    except ValueError as error:
        raise BadLine(f"TIMESTAMP is {text!r}, expected a time such as 2023-11-16 18:15:46.680") from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def read_azure(file: Path, lines: Iterator[tuple[int, str]], block_tokens: int) -> Trace:
    """Raises TraceError, with a message for each bad line."""
    number, header = next(lines)
    columns = [name.strip() for name in next(csv.reader([header]))]
    if missing := [name for name in COLUMNS if name not in columns]:
        raise TraceError([f"{file} line {number}: the header lacks {', '.join(missing)}"])
    requests = [request for _, request in parse_lines(file, lines, _Reader(columns).parse)]
    requests.sort(key=lambda request: request.time)
    first = requests[0].time if requests else 0.0
    requests = [request._replace(time=request.time - first) for request in requests]
    return Trace("azure", block_tokens, len(requests), lambda: iter(requests), has_prefixes=False)
