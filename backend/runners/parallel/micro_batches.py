"""Divides a step into micro-batches, so that all stages of a pipeline work at once (GPipe, arXiv 1811.06965)."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace

import numpy as np

from backend.engine.model_runner import StepInput

_PER_STAGE = 2
"""With n stages and m micro-batches of the same cost a step takes (n + m - 1) / m of a stage's time for all rows."""
CUDA_FEWEST_ROWS = 256
"""On a device fewer rows take about as long: the weights have to be read for them all the same."""
_DIVIDED = frozenset(
    {"token_ids", "positions", "slot_mapping", "query_starts", "block_tables", "logits_rows", "hidden_rows"}
)
"""Fields of which it is known what belongs to a row."""


def micro_batches(step: StepInput, stages: int, fewest_rows: int) -> list[StepInput]:
    """The step as one or more steps, whose outputs, one after the other, are its own.

    Rows keep their order, and each is computed after the ones before it in every layer, so a sequence may be divided
    too. A step that says more of its rows than where they are is not divided.

    Args:
        fewest_rows: of a micro-batch.
    """
    rows = len(step.token_ids)
    count = min(_PER_STAGE * stages, rows // fewest_rows)
    if stages == 1 or count < 2 or any(_has_value(step, field.name) for field in fields(step) if _is_other(field.name)):
        return [step]
    ends = [rows * part // count for part in range(count + 1)]
    return [_some_rows(step, first, end) for first, end in itertools.pairwise(ends)]


def _is_other(name: str) -> bool:
    return name not in _DIVIDED


def _has_value(step: StepInput, name: str) -> bool:
    value = getattr(step, name)
    return len(value) > 0 if hasattr(value, "__len__") else value not in (None, False)


def _some_rows(step: StepInput, first: int, end: int) -> StepInput:
    """The step of the rows from ``first`` to before ``end``."""
    starts = step.query_starts
    sequences = slice(int(np.searchsorted(starts, first, "right")) - 1, int(np.searchsorted(starts, end, "left")))

    def of_rows(wanted: np.typing.NDArray[np.int32]) -> np.typing.NDArray[np.int32]:
        low, high = np.searchsorted(wanted, [first, end])
        return wanted[low:high] - np.int32(first)

    return replace(
        step,
        token_ids=step.token_ids[first:end],
        positions=step.positions[first:end],
        slot_mapping=step.slot_mapping[first:end],
        query_starts=np.clip(starts[sequences.start : sequences.stop + 1], first, end) - np.int32(first),
        block_tables=step.block_tables[sequences],
        logits_rows=of_rows(step.logits_rows),
        hidden_rows=of_rows(step.hidden_rows),
    )
