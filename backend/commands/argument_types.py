"""Types of command-line arguments, as ``type=`` of `argparse` takes them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable

from prefix_store.store.options import read_size


def memory_size(text: str) -> int:
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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


def integer_between(low: int, high: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected {low} to {high}")
        return int(text)

    return integer


def number_between(low: float, high: float) -> Callable[[str], float]:
    return lambda text: _number(text, f"{low:g} to {high:g}", lambda value: low <= value <= high)


def context(text: str) -> int:
    if (tokens := positive(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected 2 or more: a prompt and an answer")
    return tokens


def threads(text: str) -> int:
    # More threads than processors make every step wait for the scheduler hundreds of times.
    threads, most = positive(text), os.cpu_count() or 1
    if threads > most:
        raise argparse.ArgumentTypeError(f"{text!r} is out of range, expected 1 to {most}, the number of processors")
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
