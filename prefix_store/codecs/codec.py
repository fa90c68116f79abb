"""The interface of codecs, and the keys of their blocks."""

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
        """Its name in settings."""

    @property
    def number(self) -> int:
        """Its number in frames, 0 to 255; never given to another codec."""

    @property
    def is_exact(self) -> bool:
        """Whether decoding restores every bit."""

    def payload_bytes(self, layout: BlockLayout) -> int:
        """Bytes that a block of this layout needs. Raises ValueError where the codec cannot read the layout."""

    def encode(self, segments: Segments, layout: BlockLayout, payload: Bytes) -> None:
        """Fills a payload [payload_bytes] with a block's numbers. Raises CannotEncode; the payload is then garbage."""

    def decode(self, payload: Bytes, layout: BlockLayout, into: Segments) -> None:
        """Fills a block's segments from a payload that has been verified."""


def stored_key(codec: Codec, key: bytes) -> bytes:
    """The key, 16 bytes, of a codec's form of a block in tiers and in the index.

    An exact form has the block's own key. The key of a lossy form is derived from that and from the codec's name, so
    that no request for the exact block finds it, in any tier, at any peer and with any version of this code. Parent
    keys are derived in the same way: each lossy codec has its own chains.
    """
    if codec.is_exact:
        return key
    return xxhash.xxh3_128_digest(_ADDRESS + len(codec.name).to_bytes(1, "little") + codec.name.encode() + key)


class CannotEncode(Exception):
    """The codec cannot encode these numbers; they are not stored."""
