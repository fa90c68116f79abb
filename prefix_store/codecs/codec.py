"""What all codecs can do, and how their blocks are kept apart."""

from __future__ import annotations

from typing import Protocol

import xxhash

from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments

_ADDRESS = b"keepgate kv codec\0"


class Codec(Protocol):
    """Turns the numbers of blocks into payloads and back. Has no state; any number of threads may use it."""

    @property
    def name(self) -> str:
        """By which settings and the index know it."""

    @property
    def number(self) -> int:
        """By which frames know it, 0 to 255; never given to another codec."""

    @property
    def is_exact(self) -> bool:
        """Whether decoding gives back every bit."""

    def payload_bytes(self, layout: BlockLayout) -> int:
        """Bytes that a block of this layout needs. Raises ValueError where the codec cannot read the layout."""

    def encode(self, segments: Segments, layout: BlockLayout, payload: Bytes) -> None:
        """Fills a payload [payload_bytes] with a block's numbers. Raises CannotEncode; the payload is then garbage."""

    def decode(self, payload: Bytes, layout: BlockLayout, into: Segments) -> None:
        """Fills a block's segments from a payload that has been verified."""


def stored_key(codec: Codec, key: bytes) -> bytes:
    """The key, 16 bytes, under which a codec's form of a block is kept in tiers and in the index.

    Exact forms have the block's own key. A lossy form has one that is derived from it and from the codec's name, so
    that nothing which asks for the block itself can find it, whatever tier, peer or version of this code is asked.
    Parents are derived in the same way: the forms of a codec are chains of their own.
    """
    if codec.is_exact:
        return key
    return xxhash.xxh3_128_digest(_ADDRESS + len(codec.name).to_bytes(1, "little") + codec.name.encode() + key)


class CannotEncode(Exception):
    """These numbers cannot be written in this way; they are not stored."""
