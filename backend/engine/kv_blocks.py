"""A runner's KV memory, block by block, for those who keep blocks beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Segments


class Incoming(Protocol):
    """Blocks that are being filled with keys and values from elsewhere.

    Threads write the segments; the methods belong to the engine's thread and wait for nothing. From the making of this
    until ``arrived`` no step touches the blocks.
    """

    segments: Sequence[Segments]
    """Host memory of each block, in the order in which they were named."""

    def arrived(self, count: int) -> None:
        """The first ``count`` blocks are filled: every step that is run after this sees them. Called at most once."""
        ...

    def close(self) -> None:
        """The segments are not needed any more. Called once, after ``arrived`` or in its place; no thread writes to
        them any more then."""
        ...


class Outgoing(Protocol):
    """Blocks that are being read. No step writes to them until ``close``."""

    def ready(self) -> Sequence[Segments]:
        """Host memory of each block, in the order in which they were named, once their bytes are in it.

        Waits for them, so it is called in an I/O thread. Valid until ``close``.

        Raises:
            RuntimeError: the device has failed.
        """
        ...

    def close(self) -> None:
        """The segments are not needed any more. Called once, by the engine's thread, when no thread reads them and
        none is in ``ready``; does not wait, not even for bytes that were not requested."""
        ...


class KvBlocks(Protocol):
    """Fills and reads blocks. The engine's thread calls it between steps."""

    layout: BlockLayout
    """How the numbers of a block lie in its segments, one after the other."""
    most_at_once: int
    """Blocks that one ``Incoming`` or ``Outgoing`` has at most."""

    def incoming(self, blocks: Sequence[int]) -> Incoming | None:
        """Memory to fill these blocks through; None: there is none free for so many, so they have to be computed."""
        ...

    def outgoing(self, blocks: Sequence[int]) -> Outgoing | None:
        """The blocks as the steps that have been run so far leave them; None: there is no memory free for so many."""
        ...


class HostKvBlocks:
    """Blocks in memory that the processor sees: they are filled and read where they are.

    Args:
        memory: arrays that are the KV memory together; in each the axis with number ``block_axis`` counts blocks.
    """

    def __init__(self, layout: BlockLayout, memory: Sequence[npt.NDArray[np.generic]], block_axis: int) -> None:
        self.layout = layout
        self.most_at_once = memory[0].shape[block_axis]
        self._memory = [np.moveaxis(array, block_axis, 0) for array in memory]

    def incoming(self, blocks: Sequence[int]) -> _InPlace:
        """See ``KvBlocks.incoming``; there is always room."""
        return _InPlace([self._segments(block) for block in blocks])

    def outgoing(self, blocks: Sequence[int]) -> _InPlace:
        """See ``KvBlocks.outgoing``; there is always room."""
        return _InPlace([self._segments(block) for block in blocks])

    def _segments(self, block: int) -> Segments:
        return [array[block] for array in self._memory]


class _InPlace:
    """Both ways: the segments are the blocks themselves, so there is nothing to be done."""

    def __init__(self, segments: Sequence[Segments]) -> None:
        self.segments = segments

    def arrived(self, count: int) -> None:
        """See ``Incoming.arrived``."""

    def ready(self) -> Sequence[Segments]:
        """See ``Outgoing.ready``."""
        return self.segments

    def close(self) -> None:
        """See ``Incoming.close`` and ``Outgoing.close``."""
