"""The lines of a trace, and their errors."""

import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from prefix_store.replay.trace import TraceError

T = TypeVar("T")

_GZIP = b"\x1f\x8b"
_MAX_FAULTS = 20


class BadLine(Exception):
    """An invalid line; the message says what is expected."""


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Line numbers and lines without their ends, of a plain or a gzip file; empty lines are left out.

    Raises TraceError: the file cannot be read, is a damaged gzip file, or is not UTF-8.
    """
    number = 0
    try:
        with file.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with gzip.open(file, "rb") if packed else file.open("rb") as lines:
            for number, line in enumerate(lines, 1):  # the number is for the messages below
                text = line.decode("utf-8").strip()
                if text:
                    yield number, text
    except UnicodeDecodeError as error:
        raise TraceError([f"{file} line {number}: expected UTF-8 text ({error.reason})"]) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError([f"{file}: damaged after line {number}: {error}"]) from error
    except OSError as error:
        raise TraceError([f"{file}: cannot be read: {error.strerror or error}"]) from error


def parse_lines(file: Path, lines: Iterator[tuple[int, str]], parse: Callable[[str], T]) -> Iterator[tuple[int, T]]:
    """The parsed lines, with their numbers.

    Raises TraceError at the end, if `parse` raised BadLine for any; stops after 20 bad lines.
    """
    faults: list[str] = []
    for number, line in lines:
        try:
            parsed = parse(line)
        except BadLine as fault:
            faults.append(f"{file} line {number}: {fault}")
            if len(faults) == _MAX_FAULTS:
                faults.append(f"{file}: the rest was not read")
                break
        else:
            if not faults:
                yield number, parsed
    if faults:
        raise TraceError(faults)
