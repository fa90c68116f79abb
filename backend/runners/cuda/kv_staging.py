"""Pinned host memory of bounded size, through which KV blocks are copied to a device and from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from backend.runners.cuda.streams import Event
from prefix_store.frames.segments import Segments


class StagingMemory:
    """Pinned memory, allocated in pieces of some blocks each. Used by one thread.

    A piece stores its blocks layer by layer, so that one copy moves a layer of all of them:

        layer 0                   │ layer 1                   │ …
        block 0 │ block 1 │ …     │ block 0 │ block 1 │ …     │

    Args:
        layers: of the model.
        words: 8-byte words of one layer of a block, keys and values.
        capacity: blocks that it holds.
        pinned: whether a device copies to and from it.

    Raises:
        MemoryError: the system cannot pin so much memory.
    """

    def __init__(self, layers: int, words: int, capacity: int, pinned: bool) -> None:
        self.capacity = capacity
        self._layers, self._words = layers, words
        size = capacity * layers * words
        try:
            self._memory = torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(f"the system cannot pin {8 * size} bytes of memory to stage KV blocks in") from error
        self._pieces: list[StagedBlocks] = []

    def take(self, count: int) -> StagedBlocks | None:
        """Allocates a piece for so many blocks; None: no gap between the pieces in use is large enough."""
        self._pieces = [piece for piece in self._pieces if not piece.is_free]
        start = 0
        for piece in self._pieces:
            if piece.start - start >= count:
                break
            start = piece.end
        if start + count > self.capacity:
            return None
        block_words = self._layers * self._words
        memory = self._memory[start * block_words : (start + count) * block_words]
        piece = StagedBlocks(start, memory.view(self._layers, count, self._words))
        self._pieces.append(piece)
        self._pieces.sort(key=lambda each: each.start)
        return piece


class StagedBlocks:
    """Memory of some blocks, ``words`` [layers, blocks, words] int64, from ``take`` to ``release``."""

    def __init__(self, start: int, words: torch.Tensor) -> None:
        self.start, self.end = start, start + words.shape[1]
        self.words = words
        self._is_released = False
        self._last_use: Event | None = None

    @property
    def segments(self) -> Sequence[Segments]:
        """For each block one strided view, uint8 [layers, bytes]."""
        by_layer = self.words.numpy().view(np.uint8)
        return [[by_layer[:, block]] for block in range(by_layer.shape[1])]

    def release(self, last_use: Event | None) -> None:
        """Frees the memory once the event is complete; None: at once."""
        self._is_released, self._last_use = True, last_use

    @property
    def is_free(self) -> bool:
        """Whether the memory can be allocated again."""
        return self._is_released and (self._last_use is None or self._last_use.query())
