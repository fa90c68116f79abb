"""Labelled pairs of prompts, as a file has them."""

from pathlib import Path
from typing import NamedTuple

from cache.semantic.evaluation.rows import Columns, Rows, read_rows, shown

COLUMNS = Columns(("text_a", "text_b", "label"))
# As people write them, and as pandas does where a label of the column was missing.
_LABELS = {"1": True, "0": False, "1.0": True, "0.0": False, "true": True, "false": False}


class LabelledPair(NamedTuple):
    """A cached prompt, one that is asked later, and whether the answer to the first is right for the second."""

    cached: str
    asked: str
    same: bool


def read_pairs(path: Path) -> list[LabelledPair]:
    """The pairs of a file: `text_a` is cached, `text_b` is asked, `label` is 1, 0, true or false.

    Raises UnreadableFile.
    """
    return pairs_of(read_rows(path, [COLUMNS]))


def pairs_of(rows: Rows) -> list[LabelledPair]:
    """The pairs of rows that have these columns. Raises UnreadableFile."""
    pairs = []
    for row in rows.rows:
        cached, asked, label = (row.values[column] for column in COLUMNS.required)
        same = _LABELS.get(label.strip().casefold())
        if same is None:
            raise rows.error(row, "label", f"{shown(label)} is no label; it must be 1, 0, true or false")
        pairs.append(LabelledPair(cached, asked, same))
    return pairs
