"""The small arrays of a step on the device, sent in one copy without a synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.model_runner import StepInput
from backend.kernels.paged_decode import PagedRows
from backend.kernels.paged_prefill import PagedTree, prefill_tiles

_ALIGNMENT = 4
"""Elements: arrays begin at 16 bytes, so that a kernel is compiled once and not once for each alignment."""
_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """One step in the form that the kernels take; all tensors int32 on the device."""

    token_ids: torch.Tensor
    """[T]"""
    slots: torch.Tensor
    """[T] block * BLOCK_SIZE + offset"""
    where: PagedRows
    decode_rows: torch.Tensor
    """Rows of the sequences that have one row in this step."""
    tiles: torch.Tensor
    """[tiles, 2] of the other sequences, see ``prefill_tiles``."""
    logits_rows: torch.Tensor
    hidden_rows: torch.Tensor
    tree: PagedTree | None = None


class Staging:
    """Copies arrays to a device through pinned memory.

    Two buffers alternate, so that the next step can be prepared while the last one is still being copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * _BUFFERS
        self._sent: list[torch.cuda.Event] = []
        if self._pinned:
            self._sent = [torch.cuda.Event() for _ in range(_BUFFERS)]  # type: ignore[no-untyped-call] # torch's own gap
        self._turn = 0

    def send(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
        """The arrays on the device, in their shapes; the copy is ordered before what is launched next."""
        ends = np.cumsum([-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]).tolist()
        buffer = self._next_buffer(ends[-1])
        staged = buffer.numpy()
        begins = [0, *ends[:-1]]
        for begin, array in zip(begins, arrays, strict=True):
            staged[begin : begin + array.size] = array.reshape(-1)
        there = buffer[: ends[-1]].to(self._device, non_blocking=True)
        if self._pinned:
            self._sent[self._turn].record()
        else:
            there = there.clone()
        return [
            there[begin : begin + array.size].view(array.shape) for begin, array in zip(begins, arrays, strict=True)
        ]

    def _next_buffer(self, size: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % _BUFFERS
        if self._pinned:
            self._sent[self._turn].synchronize()
        if self._buffers[self._turn].numel() < size:
            self._buffers[self._turn] = torch.empty(2 * size, dtype=torch.int32, pin_memory=self._pinned)
        return self._buffers[self._turn]


def device_step(step: StepInput, staging: Staging, tile_rows: int) -> DeviceStep:
    """Sends a step; sequences of one row go to the decode kernel, the others to the prefill kernel in tiles."""
    counts = np.diff(step.query_starts)
    row_sequence = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    sent = staging.send(
        [
            step.token_ids,
            step.slot_mapping.astype(np.int32),
            step.block_tables,
            row_sequence,
            step.positions,
            step.query_starts[:-1][counts == 1],
            prefill_tiles(step.query_starts, step.positions, tile_rows),
            step.logits_rows,
            step.hidden_rows,
            *([] if step.tree is None else [step.tree.places, step.tree.seen, step.tree.masks.view(np.int32)]),
        ]
    )
    token_ids, slots, tables, sequences, positions, decode_rows, tiles, logits_rows, hidden_rows, *branching = sent
    tree = PagedTree(branching[0], branching[1], branching[2].view(torch.int64)) if branching else None
    if step.device_tokens is not None:
        token_ids = step.device_tokens.to(torch.int32)
    where = PagedRows(tables, sequences, positions)
    return DeviceStep(token_ids, slots, where, decode_rows, tiles, logits_rows, hidden_rows, tree)
