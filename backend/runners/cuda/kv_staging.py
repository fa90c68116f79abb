"""Host memory that KV blocks pass through on their way to a device or from it, so much and no more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from backend.runners.cuda.streams import Mark
from prefix_store.frames.segments import Segments


class StagingMemory:
    """Pinned memory, handed out in pieces for some blocks each. Used by one thread.

    A piece has its blocks layer by layer, so that one copy moves a layer of all of them:

        layer 0                   │ layer 1                   │ …
        block 0 │ block 1 │ …     │ block 0 │ block 1 │ …     │

    Args:
        layers: of the model.
        words: 8-byte words of one layer of a block, keys and values.
        capacity: blocks that it holds.
        pinned: whether a device copies from and to it.

    Raises:
        MemoryError: the system does not pin so much.
    """

    def __init__(self, layers: int, words: int, capacity: int, pinned: bool) -> None:
        self.capacity = capacity
        self._layers, self._words = layers, words
        size = capacity * layers * words
        try:
            self._memory = torch.empty(size, dtype=torch.int64, pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(f"the system does not pin {8 * size} bytes of memory to stage KV blocks in") from error
        self._pieces: list[StagedBlocks] = []

    def take(self, count: int) -> StagedBlocks | None:
        """A piece for so many blocks; None: there is no room for it between those that are in use."""
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
    """Memory of some blocks, ``words`` [layers, blocks, words] int64, from its taking until it is given back."""

    def __init__(self, start: int, words: torch.Tensor) -> None:
        self.start, self.end = start, start + words.shape[1]
        self.words = words
        self._given_back = False
        self._last_use: Mark | None = None

    @property
    def segments(self) -> Sequence[Segments]:
        """Of each block, one strided view [layers, bytes]."""
        by_layer = self.words.numpy().view(np.uint8)
        return [[by_layer[:, block]] for block in range(by_layer.shape[1])]

    def give_back(self, last_use: Mark | None) -> None:
        """Others may have it when the device, too, is done with it; None: at once."""
        self._given_back, self._last_use = True, last_use

    @property
    def is_free(self) -> bool:
        """Whether others may have it."""
        return self._given_back and (self._last_use is None or self._last_use.passed())
