"""CUDA graphs of decode steps, captured for some batch sizes and then replayed.

A replay launches hundreds of kernels at the cost of one. A batch between two sizes is padded with rows that read and
write a spare block, which no sequence ever owns.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from backend.engine.model_runner import BLOCK_SIZE, StepInput
from backend.kernels.paged_decode import PagedRows
from backend.runners.cuda.decoder import CudaDecoder
from backend.runners.cuda.device_step import DeviceStep, Staging
from backend.runners.errors import RunnerUnavailable


def bucket_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, …, and the largest batch itself."""
    sizes = {max_batch}
    power = 1
    while power < max_batch:
        sizes |= {power, power * 3 // 2} if power >= 16 else {power}
        power *= 2
    return sorted(size for size in sizes if size <= max_batch)


def is_pure_decode(step: StepInput) -> bool:
    """Whether each sequence has one row, and the step needs the logits of all rows and no hidden states."""
    rows = len(step.token_ids)
    return rows == len(step.query_starts) - 1 == len(step.logits_rows) and not len(step.hidden_rows)


def padded_rows(step: StepInput, size: int, spare_block: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """A decode step, padded to the rows of a recording.

    Returns:
        int32 [3, size]: token, position and slot of each row; int32 [size, B]: block tables. A padding row
        is the first token of a context in ``spare_block``: it reads and writes nothing else.
    """
    rows, width = step.block_tables.shape
    packed = np.zeros((3, size), dtype=np.int32)
    packed[2] = spare_block * BLOCK_SIZE
    packed[:, :rows] = step.token_ids, step.positions, step.slot_mapping
    tables = np.full((size, width), spare_block, dtype=np.int32)
    tables[:rows] = step.block_tables
    return packed, tables


class DecodeGraphs:
    """Records the decoder at every batch size, the largest first; the recordings share one memory pool.

    Args:
        spare_block: KV block of the padding rows.
        max_blocks: width of the block tables.

    Raises:
        RunnerUnavailable: a recording computes something else than the decoder it was made from.
    """

    def __init__(
        self, decoder: CudaDecoder, staging: Staging, max_batch: int, max_blocks: int, spare_block: int
    ) -> None:
        self._staging = staging
        self.sizes = bucket_sizes(max_batch)
        self._max_blocks = max_blocks
        self._spare = spare_block
        device = decoder.device
        # Rows: token, position, slot, at fixed addresses for the recordings; each begins at 16 bytes, as in Staging.
        self._rows = torch.zeros(3, -(-max_batch // 4) * 4, dtype=torch.int32, device=device)
        self._rows[2] = spare_block * BLOCK_SIZE
        self._tables = torch.full((max_batch, max_blocks), spare_block, dtype=torch.int32, device=device)
        self._order = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._no_tiles = torch.empty(0, 2, dtype=torch.int32, device=device)
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        pool = None
        for size in reversed(self.sizes):
            step = self._step(size)
            # Kernels are compiled and cuBLAS chooses its kernels here: neither is possible while recording.
            expected, _ = decoder(step)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits, _ = decoder(step)
            pool = graph.pool()
            graph.replay()
            if not torch.allclose(logits, expected, rtol=1e-2, atol=1e-2):
                raise RunnerUnavailable(f"the recorded step for a batch of {size} does not compute what it recorded")
            self._recorded[size] = graph, logits

    def size_for(self, rows: int) -> int | None:
        """Size of the smallest recording with at least so many rows; None: there is none."""
        return next((size for size in self.sizes if size >= rows), None)

    def run(self, step: StepInput) -> torch.Tensor | None:
        """Logits float32 [rows, vocab_size], valid until the next run; None: no recording is large enough."""
        rows, width = step.block_tables.shape
        size = self.size_for(rows)
        if size is None or width > self._max_blocks:
            return None
        new_rows, new_tables = self._staging.send(padded_rows(step, size, self._spare))
        self._rows[:, :size].copy_(new_rows)
        if step.device_tokens is not None:
            self._rows[0, :rows].copy_(step.device_tokens)
        self._tables[:size, :width].copy_(new_tables)
        graph, logits = self._recorded[size]
        graph.replay()
        return logits[:rows]

    def _step(self, size: int) -> DeviceStep:
        order = self._order[:size]
        where = PagedRows(self._tables[:size], order, self._rows[1, :size])
        return DeviceStep(
            self._rows[0, :size], self._rows[2, :size], where, order, self._no_tiles, order, self._order[:0]
        )
