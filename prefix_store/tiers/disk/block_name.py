"""The file name of a block."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from prefix_store.codecs.frame_format import FrameFormat
from prefix_store.frames.block_id import BlockId

_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})(-first)?")


class BlockName(NamedTuple):
    """A block by its stored keys. ``is_first``: it is the first of its chain and has no parent.

    The file name contains it, so that the evictor can tell the first block of a chain from one whose parent is lost.
    """

    key: bytes
    parent: bytes
    is_first: bool

    def file(self) -> str:
        """Path below the folder of all blocks."""
        name = self.base()
        return f"{name[:2]}/{name}"

    def base(self) -> str:
        """The last part of that path."""
        return f"{self.key.hex()}-{self.parent.hex()}{'-first' if self.is_first else ''}"

    @classmethod
    def of(cls, file: str) -> BlockName | None:
        """From the last part of such a path; None if it is not a block's."""
        found = _NAME.fullmatch(file)
        return found and cls(bytes.fromhex(found[1]), bytes.fromhex(found[2]), found[3] is not None)


def block_name(frame_format: FrameFormat, chain: Sequence[BlockId], place: int) -> BlockName:
    """The name of a chain's block in this format."""
    block = chain[place]
    return BlockName(frame_format.stored_key(block.key), frame_format.stored_key(block.parent), not place)
