"""From the scheduler's chunks to the arrays that a runner takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backend.runner import BLOCK_SIZE, StepInput
from backend.scheduler import Chunk
from backend.sequence_notes import SequenceNotes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Which rows of a step's output belong to one chunk."""

    logits: slice
    hidden: slice


def step_input(chunks: list[Chunk], notes: Mapping[int, SequenceNotes]) -> tuple[StepInput, list[ChunkRows]]:
    """One step of these chunks, and where each will find its output; ``notes`` by sequence id."""
    tokens: list[int] = []
    starts = [0]
    logits_rows: list[int] = []
    hidden_rows: list[int] = []
    outputs: list[ChunkRows] = []
    widest = max(len(chunk.sequence.blocks) for chunk in chunks)
    tables = np.zeros((len(chunks), widest), dtype=np.int32)
    for index, chunk in enumerate(chunks):
        sequence = chunk.sequence
        tokens += sequence.tokens[chunk.start : chunk.start + chunk.count]
        tables[index, : len(sequence.blocks)] = sequence.blocks
        logits_from, hidden_from = _first_wanted(chunk, notes[sequence.id])
        first_logits, first_hidden = len(logits_rows), len(hidden_rows)
        logits_rows += range(starts[-1] + logits_from, starts[-1] + chunk.count)
        hidden_rows += range(starts[-1] + hidden_from, starts[-1] + chunk.count)
        outputs.append(ChunkRows(slice(first_logits, len(logits_rows)), slice(first_hidden, len(hidden_rows))))
        starts.append(starts[-1] + chunk.count)
    counts = np.diff(starts)
    rows = np.repeat(np.arange(len(chunks)), counts)
    first_positions = np.array([chunk.start for chunk in chunks])
    positions = np.arange(len(tokens)) - np.repeat(starts[:-1], counts) + first_positions[rows]
    slots = tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    step = StepInput(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots,
        query_starts=np.array(starts, dtype=np.int32),
        block_tables=tables,
        logits_rows=np.array(logits_rows, dtype=np.int32),
        hidden_rows=np.array(hidden_rows, dtype=np.int32),
    )
    return step, outputs


def following_step(chunks: list[Chunk], tokens: torch.Tensor) -> tuple[StepInput, list[ChunkRows]]:
    """A step of one row for each chunk, whose tokens int64 [len(chunks)] are on the runner's device."""
    widest = max(len(chunk.sequence.blocks) for chunk in chunks)
    tables = np.zeros((len(chunks), widest), dtype=np.int32)
    for index, chunk in enumerate(chunks):
        tables[index, : len(chunk.sequence.blocks)] = chunk.sequence.blocks
    rows = np.arange(len(chunks), dtype=np.int32)
    positions = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    step = StepInput(
        token_ids=np.zeros(len(chunks), dtype=np.int32),
        positions=positions,
        slot_mapping=tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_starts=np.arange(len(chunks) + 1, dtype=np.int32),
        block_tables=tables,
        logits_rows=rows,
        device_tokens=tokens,
    )
    return step, [ChunkRows(slice(row, row + 1), slice(0, 0)) for row in range(len(chunks))]


def _first_wanted(chunk: Chunk, notes: SequenceNotes) -> tuple[int, int]:
    """First rows, counted in the chunk, from which on logits and hidden states are needed; ``count``: none are.

    Logits: of the last row if a token follows, of all for log-probabilities of the prompt. Hidden states: of a pooled
    sequence those that are not in its sum yet; of another one the last of a chunk that gives no logits, which has
    seen all before it and so shows whether the chunk's numbers are sound.
    """
    sequence, none, last = chunk.sequence, chunk.count, chunk.count - 1
    if sequence.pooled:
        return none, min(max(0, notes.num_pooled - chunk.start), none)
    if sequence.params.prompt_logprobs and len(sequence.prompt_logprobs) < sequence.num_prompt:
        return 0, none
    return (last, none) if chunk.reaches_end else (none, last)
