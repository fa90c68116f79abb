"""What the values of the command line's options may be."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable

_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
# What a signed 64-bit integer holds, as addresses and the system's own sizes do, less than the step between floats.
_LARGEST_SIZE = 2**62
_LONGEST_QUOTED = 40


def memory_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{_quoted(text)} is no size, expected such as 512MiB or 2GiB")
    size = float(match[1]) * unit
    if not 1 <= size <= _LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"{_quoted(text)} is out of range, expected 1 byte to {_LARGEST_SIZE} bytes")
    return int(size)


def _quoted(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_QUOTED else text[:_LONGEST_QUOTED] + "…")


def port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port, expected 0 to 65535")
    return int(text)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected 1 or more")
    return int(text)


def non_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected 0 or more")
    return int(text)


def context(text: str) -> int:
    if (tokens := positive(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected 2 or more: a token and its answer")
    return tokens


def threads(text: str) -> int:
    # More than there are processors make every step wait for the system's scheduler, hundreds of times.
    threads, most = positive(text), os.cpu_count() or 1
    if threads > most:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected 1 to {most}, the processors there are")
    return threads


def seconds(text: str) -> float:
    return _number(text, "seconds, more than 0", lambda value: value > 0)


def milliseconds(text: str) -> float:
    return _number(text, "milliseconds, 0 or more", lambda value: value >= 0)


def _number(text: str, expected: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected {expected}")
    return value
