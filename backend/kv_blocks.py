"""A runner's KV memory, block by block, for those who keep blocks beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Segments


class KvBlocks(Protocol):
    """Reads and writes blocks that no step touches meanwhile."""

    layout: BlockLayout
    """How the numbers of a block lie in its segments, one after the other."""

    def segments(self, block: int) -> Segments:
        """The memory of a block itself, not a copy."""
        ...


class HostKvBlocks:
    """Blocks in memory that the processor sees.

    Args:
        memory: arrays that are the KV memory together; in each the axis with number ``block_axis`` counts blocks.
    """

    def __init__(self, layout: BlockLayout, memory: Sequence[npt.NDArray[np.generic]], block_axis: int) -> None:
        self.layout = layout
        self._memory = [np.moveaxis(array, block_axis, 0) for array in memory]

    def segments(self, block: int) -> Segments:
        """See ``KvBlocks.segments``."""
        return [array[block] for array in self._memory]
