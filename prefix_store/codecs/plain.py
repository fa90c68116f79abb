"""Unchanged blocks."""

from __future__ import annotations

from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments, gather, scatter


class Plain:
    """Every bit of a block, in the order of its layout, for any layout."""

    name = "plain"
    number = 0
    is_exact = True

    def payload_bytes(self, layout: BlockLayout) -> int:
        """As many as the block has."""
        return layout.nbytes

    def encode(self, segments: Segments, layout: BlockLayout, payload: Bytes) -> None:
        """Copies the segments, in order."""
        gather(segments, payload)

    def decode(self, payload: Bytes, layout: BlockLayout, into: Segments) -> None:
        """Copies into the segments, in order."""
        scatter(payload, into)
