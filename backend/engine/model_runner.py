"""The contract between the engine and what computes: one step over rows of tokens on a paged KV memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from backend.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from backend.engine.kv_blocks import KvBlocks

BLOCK_SIZE = 16
"""Tokens in one KV block."""
MAX_TREE_TOKENS = 63
"""Of one draft that branches: a row's mask has a bit for each."""
CPU_BATCH, CPU_STEP_TOKENS = 32, 128
"""Defaults for CPUs, where a step of more tokens would delay running answers noticeably."""


def _no_rows() -> npt.NDArray[np.int32]:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class TreeRows:
    """What the rows of a step see where drafts branch (tree attention: arXiv 2305.09781, 2401.10774).

    Tokens of a draft that branches have places of their own in the sequence's blocks, one after the other, whatever
    their positions. A row sees every place before ``seen``, and those of the ``masks``.
    """

    places: npt.NDArray[np.int32]
    """[T] where in its sequence's blocks a row's keys and values are; its position, unless it is of a draft."""
    seen: npt.NDArray[np.int32]
    """[T]"""
    masks: npt.NDArray[np.int64]
    """[T] bit i: the row sees place ``seen + i`` too; 0 for rows that are of no draft that branches."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: T rows (tokens) of S sequences; the rows of a sequence are consecutive and in order.

    row        0   1   2   3 | 4 | 5
    sequence   a   a   a   a | b | c        query_starts = [0, 4, 5, 6]
    position   8   9  10  11 |97 |20        keys and values of a row go to slot_mapping[row]
    """

    token_ids: npt.NDArray[np.int32]
    """[T]"""
    positions: npt.NDArray[np.int32]
    """[T] place of the token in its sequence, from 0."""
    slot_mapping: npt.NDArray[np.int64]
    """[T] block * BLOCK_SIZE + offset: where the row's keys and values are written."""
    query_starts: npt.NDArray[np.int32]
    """[S + 1] first row of each sequence, then T."""
    block_tables: npt.NDArray[np.int32]
    """[S, B] blocks of each sequence in order; entries beyond its length are 0 and never read."""
    logits_rows: npt.NDArray[np.int32]
    """[R] rows whose logits are wanted, ascending."""
    hidden_rows: npt.NDArray[np.int32] = field(default_factory=_no_rows)
    """[E] rows whose hidden states are wanted, ascending."""
    tree: TreeRows | None = None
    """None: every row sees all positions up to its own."""
    device_tokens: torch.Tensor | None = None
    """int64 [T] in place of ``token_ids``, where the runner's device alone knows them yet; only for a runner whose last
    step was ``unfinished``."""


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive tokens of one sequence, to be computed in one step."""

    token_ids: Sequence[int]
    start: int
    """Position of the first."""
    blocks: Sequence[int]
    """Of the sequence, in order."""
    first_block: int = 0
    """Index in the sequence of the first of ``blocks``; no layer attends to the blocks before it."""
    parents: Sequence[int] = ()
    """For each token of a draft that branches, which are the last ones: the index among them of the token that it
    follows; -1: the one before all of them."""


def pack(sequences: Sequence[SequenceRows], logits_rows: Iterable[int], hidden_rows: Iterable[int] = ()) -> StepInput:
    """The step of these rows, with their positions and KV slots.

    Builds lists: most steps have one row for each sequence, where a NumPy call costs more than the row.
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
    # Changes the positions of what branches.
    tree = _tree_rows(sequences, positions) if any(rows.parents for rows in sequences) else None
    return StepInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=np.array(positions, dtype=np.int32),
        slot_mapping=np.array(slots, dtype=np.int64),
        query_starts=np.array(starts, dtype=np.int32),
        block_tables=tables,
        logits_rows=np.array(list(logits_rows), dtype=np.int32),
        hidden_rows=np.array(list(hidden_rows), dtype=np.int32),
        tree=tree,
    )


def _tree_rows(sequences: Sequence[SequenceRows], positions: list[int]) -> TreeRows:
    """Of the rows whose places are ``positions``; brings the positions of those of a draft to their depths."""
    places = np.array(positions, dtype=np.int32)
    seen, masks = places + 1, np.zeros(len(places), dtype=np.int64)
    end = 0
    for rows in sequences:
        end += len(rows.token_ids)
        begin = end - len(rows.parents)
        before = rows.start + len(rows.token_ids) - len(rows.parents)
        for node, parent in enumerate(rows.parents):
            row = begin + node
            seen[row] = before
            masks[row] = (masks[begin + parent] if parent >= 0 else 0) | (1 << node)
            positions[row] = (positions[begin + parent] if parent >= 0 else before - 1) + 1
    return TreeRows(places, seen, masks)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed; the tensors are only valid until the runner's next step."""

    logits: torch.Tensor
    """float32 [R, vocab_size]"""
    hidden: torch.Tensor
    """float32 [E, hidden_size], after the last norm: what the head would be applied to."""
    unfinished: bool = False
    """Whether a device is still computing them. Work on them is then queued behind that, and so is the next step,
    which may be launched at once: reading them on the host is what waits."""
    padding_rows: int = 0
    """Rows computed beside those that were asked for, to fill up a shape that was prepared."""


class ModelRunner(Protocol):
    """Owns weights and KV memory. One thread calls it."""

    config: ModelConfig
    name: str
    """Short name for people: which path serves, and in which precision."""
    weights_precision: str
    kv_precision: str
    kv_bytes_per_token: int
    """Over all layers, scales included."""
    num_blocks: int
    max_batch: int
    """Sequences at a time, and tokens in a step, that suit it best; the engine's configuration may differ."""
    step_tokens: int
    kernels: str
    """What computes, as far as rounding depends on it: two runners that name the same here, and are alike otherwise,
    compute the same bits wherever ``deterministic`` is true."""
    deterministic: bool
    """Whether a row's logits are bitwise the same whatever else is in the step, and however it was chunked."""

    @property
    def kv_blocks(self) -> KvBlocks | None:
        """Its blocks, always the same object, for those who keep them elsewhere; None: this runner has none to give.

        A call may allocate memory for them, so call it only to use them, and not during a step.
        """
        ...

    def run(self, step: StepInput) -> StepOutput:
        """Computes every row and writes its keys and values."""
        ...

    def move_kv(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies the keys and values of slots to other slots, one after the other, behind the last step."""
        ...
