"""Frames of one kind: blocks of one layout, written by one codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from prefix_store.codecs.codec import Codec, stored_key
from prefix_store.frames.block_id import ID_BYTES, BlockId
from prefix_store.frames.frame import HEADER_BYTES, BadFrame, FrameHeader, HeaderTemplate, checksum_of
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments

_NO_BLOCK = BlockId(*(bytes(ID_BYTES) for _ in range(4)))


@dataclass(frozen=True)
class FrameFormat:
    """Converts blocks to frames and back. Has no state; any thread may use it.

    Raises:
        ValueError: the codec cannot write blocks of this layout.
    """

    layout: BlockLayout
    codec: Codec

    def __post_init__(self) -> None:
        # Both are used often, and computed once.
        payload_bytes = self.codec.payload_bytes(self.layout)
        template = HeaderTemplate(FrameHeader.of(_NO_BLOCK, self.codec.number, self.layout, payload_bytes, 0))
        object.__setattr__(self, "_payload_bytes", payload_bytes)
        object.__setattr__(self, "_template", template)

    @property
    def payload_bytes(self) -> int:
        """Bytes of every payload."""
        payload_bytes: int = self.__dict__["_payload_bytes"]
        return payload_bytes

    @property
    def frame_bytes(self) -> int:
        """Bytes of every frame: header and payload."""
        return HEADER_BYTES + self.payload_bytes

    def stored_key(self, key: bytes) -> bytes:
        """The key of a block's frame in this format; see `stored_key` in codec.py."""
        return stored_key(self.codec, key)

    def seal(self, block: BlockId, source: BlockSource, frame: Bytes) -> None:
        """Fills a frame [frame_bytes] with a block. Raises CannotEncode; the frame is invalid."""
        if (given := self.frame_in(source)) is not None:
            np.copyto(frame, given)
            return
        payload = frame[HEADER_BYTES:]
        self.codec.encode(source.segments if isinstance(source, SealedBlock) else source, self.layout, payload)
        frame[:HEADER_BYTES] = np.frombuffer(self._header(block, checksum_of(payload.data)), np.uint8)

    def frame_in(self, source: BlockSource) -> Bytes | None:
        """The source's frame, if it has one of this format."""
        return source.frame if isinstance(source, SealedBlock) and source.format == self else None

    def verify(self, block: BlockId, frame: Bytes) -> None:
        """Raises BadFrame unless this is the complete, undamaged frame of this block in this format."""
        payload = frame[HEADER_BYTES:].data
        is_whole = len(payload) == self.payload_bytes
        if is_whole and frame[:HEADER_BYTES].tobytes() == self._header(block, checksum_of(payload)):
            return
        # The frame is wrong: find the field, for the message.
        header = FrameHeader.unpack(frame[:HEADER_BYTES].data)
        header.check(FrameHeader.unpack(self._header(block, 0)))
        if len(frame) != self.frame_bytes:
            raise BadFrame("frame bytes", self.frame_bytes, len(frame))
        header.check_payload(payload)

    def decode(self, frame: Bytes, into: Segments) -> None:
        """Fills a block's segments from its frame, which has been verified."""
        self.codec.decode(frame[HEADER_BYTES:], self.layout, into)

    def _header(self, block: BlockId, checksum: int) -> bytes:
        template: HeaderTemplate = self.__dict__["_template"]
        names = (block.namespace, self.stored_key(block.key), self.stored_key(block.parent), block.tokens)
        return template.pack(names, checksum)


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block that has been sealed once: its frame, and the segments that are in it."""

    format: FrameFormat
    frame: Bytes
    segments: Segments


BlockSource: TypeAlias = Segments | SealedBlock
"""What a frame is made from."""
