"""Pairs of prompts with the verdict that is right, by kind of trap."""

from pathlib import Path
from typing import NamedTuple

DATA = Path(__file__).resolve().parents[2] / "data" / "semantic"


class Pair(NamedTuple):
    kind: str
    asked: str
    cached: str
    is_trap: bool  # the answer to `cached` is wrong for `asked`


def trap_pairs() -> list[Pair]:
    """The pairs of trap_pairs.txt. Raises ValueError for a line that is no pair."""
    pairs = []
    kind = ""
    for number, line in enumerate((DATA / "trap_pairs.txt").read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("## "):
            kind = line.removeprefix("## ")
        elif not line.startswith("#"):
            parts = [part.strip() for part in line.split("|")]
            if len(parts) != 3 or parts[2] not in ("trap", ""):
                raise ValueError(f"trap_pairs.txt, line {number}: not of the form asked | cached | trap")
            pairs.append(Pair(kind, parts[0], parts[1], parts[2] == "trap"))
    return pairs
