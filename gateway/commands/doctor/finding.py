"""What a check has found, in one line, and what to do about it."""

from typing import Literal

import msgspec

Status = Literal["ok", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """A result of a check.

    A `problem` keeps the gateway from starting or from answering as the settings ask, a `warning` may. `advice` says
    what to do; it is empty where the status is `ok`.
    """

    check: str
    status: Status
    summary: str
    advice: str = ""


def ok(check: str, summary: str) -> Finding:
    return Finding(check, "ok", _line(summary))


def warning(check: str, summary: str, advice: str) -> Finding:
    return Finding(check, "warning", _line(summary), _line(advice))


def problem(check: str, summary: str, advice: str) -> Finding:
    return Finding(check, "problem", _line(summary), _line(advice))


def in_units(size: float) -> str:
    """Bytes for people, such as 1.5 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 2**10:
            return f"{size:.3g} {unit}"
        size /= 2**10
    return f"{size:,.1f} GiB"


def _line(text: str) -> str:
    """In one line, without what may control a terminal: servers and files have written parts of it."""
    return "".join(character if character.isprintable() else " " for character in " ".join(text.split()))
