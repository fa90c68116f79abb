"""From the scheduler's chunks to the arrays that a runner takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from backend.engine.runner import BLOCK_SIZE, StepInput
from backend.engine.scheduler import Chunk
from backend.engine.sequence_notes import SequenceNotes

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Which rows of a step's output belong to one chunk."""

    logits: slice
    hidden: slice


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive tokens of one sequence, to be computed in one step."""

    token_ids: Many[int]
    start: int
    """Position of the first."""
    blocks: Many[int]
    """Of the sequence, in order."""
    first_block: int = 0
    """Which block of the sequence the first of ``blocks`` is; those before it are in no layer's sight."""


def pack(sequences: Many[SequenceRows], logits_rows: Iterable[int], hidden_rows: Iterable[int] = ()) -> StepInput:
    """A step of these rows: where each lies, and where its keys and values go.

    Lists, for most steps have one row of each sequence, where a call of numpy costs more than the row.
    """
    tables = np.zeros((len(sequences), max(r.first_block + len(r.blocks) for r in sequences)), dtype=np.int32)
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for table, rows in zip(tables, sequences, strict=True):
        table[rows.first_block : rows.first_block + len(rows.blocks)] = rows.blocks
        own = range(rows.start, rows.start + len(rows.token_ids))
        token_ids += rows.token_ids
        positions += own
        slots += [rows.blocks[at // BLOCK_SIZE - rows.first_block] * BLOCK_SIZE + at % BLOCK_SIZE for at in own]
        starts.append(len(positions))
    return StepInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_starts=np.array(starts, dtype=np.int32),
        block_tables=tables,
        logits_rows=np.array(list(logits_rows), dtype=np.int32),
        hidden_rows=np.array(list(hidden_rows), dtype=np.int32),
    )


def step_input(chunks: list[Chunk], notes: Mapping[int, SequenceNotes]) -> tuple[StepInput, list[ChunkRows]]:
    """One step of these chunks, and where each will find its output; ``notes`` by sequence id."""
    sequences: list[SequenceRows] = []
    logits_rows: list[int] = []
    hidden_rows: list[int] = []
    outputs: list[ChunkRows] = []
    begin = 0
    for chunk in chunks:
        sequence, end = chunk.sequence, begin + chunk.count
        tokens = sequence.tokens[chunk.start : chunk.start + chunk.count]
        sequences.append(SequenceRows(tokens, chunk.start, sequence.blocks, sequence.first_block))
        logits_from, hidden_from = _first_wanted(chunk, notes[sequence.id])
        first_logits, first_hidden = len(logits_rows), len(hidden_rows)
        logits_rows += range(begin + logits_from, end)
        hidden_rows += range(begin + hidden_from, end)
        outputs.append(ChunkRows(slice(first_logits, len(logits_rows)), slice(first_hidden, len(hidden_rows))))
        begin = end
    return pack(sequences, logits_rows, hidden_rows), outputs


def following_step(chunks: list[Chunk], tokens: torch.Tensor) -> tuple[StepInput, list[ChunkRows]]:
    """A step of one row for each chunk, whose tokens int64 [len(chunks)] are on the runner's device."""
    not_here = [0]  # one row; the runner takes its token from device_tokens
    step = pack(
        [SequenceRows(not_here, c.start, c.sequence.blocks, c.sequence.first_block) for c in chunks],
        range(len(chunks)),
    )
    rows = [ChunkRows(slice(row, row + 1), slice(0, 0)) for row in range(len(chunks))]
    return replace(step, device_tokens=tokens), rows


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
