"""A block's numbers where an engine has them: in some pieces of memory, of which each may be strided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Segments: TypeAlias = Sequence[memoryview | npt.NDArray[np.generic]]
"""Buffers that hold a block's bytes one after the other. A buffer may be an n-dimensional view with gaps, such as
``kv[:, :, block]``: one of those per block is copied in a single call, which many small ones are not."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


def gather(segments: Segments, into: Bytes) -> None:
    """Copies segments into contiguous bytes [n]. Raises ValueError where they are not n bytes together."""
    for segment, piece in _pairs(segments, into):
        np.copyto(piece, segment)


def scatter(data: Bytes, into: Segments) -> None:
    """Copies contiguous bytes [n] into segments. Raises ValueError where they are not n bytes together."""
    for segment, piece in _pairs(into, data):
        np.copyto(segment, piece)


def total_bytes(segments: Segments) -> int:
    """Bytes of all of them together."""
    return sum(segment.nbytes for segment in segments)


def _pairs(segments: Segments, data: Bytes) -> list[tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]]:
    """Each segment with its part of the data, in the segment's shape."""
    if total_bytes(segments) != data.nbytes:
        raise ValueError(f"segments have {total_bytes(segments)} bytes together, expected {data.nbytes}")
    pairs = []
    start = 0
    for segment in segments:
        array = np.asarray(segment)
        pairs.append((array, data[start : start + array.nbytes].view(array.dtype).reshape(array.shape)))
        start += array.nbytes
    return pairs
