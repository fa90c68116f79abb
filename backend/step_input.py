"""From the scheduler's chunks to the arrays that a runner takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backend.runner import BLOCK_SIZE, StepInput
from backend.scheduler import Chunk
from backend.sequence_notes import SequenceNotes


def wanted_rows(chunk: Chunk) -> range:
    """Rows of the chunk (counted in it) whose logits are needed: mostly the last, or none."""
    sequence = chunk.sequence
    if sequence.pooled:
        return range(0)
    if sequence.params.prompt_logprobs and len(sequence.prompt_logprobs) < sequence.num_prompt:
        return range(chunk.count)
    return range(chunk.count - 1, chunk.count) if chunk.reaches_end else range(0)


def state_rows(chunk: Chunk, notes: SequenceNotes) -> range:
    """Rows of the chunk (counted in it) whose hidden states are needed.

    For a pooled sequence those that are not in its sum yet. For another one the last row of a chunk that gives no
    logits: it has seen all before it, so it shows whether the chunk's numbers are sound.
    """
    if chunk.sequence.pooled:
        return range(min(max(0, notes.num_pooled - chunk.start), chunk.count), chunk.count)
    return range(chunk.count - 1, chunk.count) if not wanted_rows(chunk) else range(0)


def step_input(chunks: list[Chunk], notes: Mapping[int, SequenceNotes]) -> StepInput:
    """One step of these chunks; ``notes`` by sequence id."""
    tokens: list[int] = []
    starts = [0]
    logits_rows: list[int] = []
    hidden_rows: list[int] = []
    widest = max(len(chunk.sequence.blocks) for chunk in chunks)
    tables = np.zeros((len(chunks), widest), dtype=np.int32)
    for index, chunk in enumerate(chunks):
        sequence = chunk.sequence
        tokens += sequence.tokens[chunk.start : chunk.start + chunk.count]
        tables[index, : len(sequence.blocks)] = sequence.blocks
        logits_rows += [starts[-1] + row for row in wanted_rows(chunk)]
        hidden_rows += [starts[-1] + row for row in state_rows(chunk, notes[sequence.id])]
        starts.append(starts[-1] + chunk.count)
    counts = np.diff(starts)
    rows = np.repeat(np.arange(len(chunks)), counts)
    first_positions = np.array([chunk.start for chunk in chunks])
    positions = np.arange(len(tokens)) - np.repeat(starts[:-1], counts) + first_positions[rows]
    slots = tables[rows, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepInput(
        token_ids=np.array(tokens, dtype=np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots,
        query_starts=np.array(starts, dtype=np.int32),
        block_tables=tables,
        logits_rows=np.array(logits_rows, dtype=np.int32),
        hidden_rows=np.array(hidden_rows, dtype=np.int32),
    )
