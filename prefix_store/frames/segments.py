"""A block's numbers in an engine's memory: several buffers, each of which may be strided."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Segments: TypeAlias = Sequence[memoryview | npt.NDArray[np.generic]]
"""Buffers that hold a block's bytes one after the other. A buffer may be an n-dimensional view with gaps, such as
``kv[:, :, block]``: one such view per block is copied in a single call, many small buffers are not."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


def gather(segments: Segments, into: Bytes) -> None:
    """Copies segments into contiguous bytes [n]. Raises ValueError where they are not n bytes together."""
    for segment, piece in _pairs(segments, into):
        np.copyto(piece, segment)


def scatter(data: Bytes, into: Segments) -> None:
    """Copies contiguous bytes [n] into segments. Raises ValueError where they are not n bytes together."""
    for segment, piece in _pairs(into, data):
        np.copyto(segment, piece)


_Pair: TypeAlias = tuple[npt.NDArray[np.generic], npt.NDArray[np.generic]]


def _pairs(segments: Segments, data: Bytes) -> list[_Pair]:
    """Each segment with its part of the data, in the segment's dtype and shape."""
    if len(segments) == 1 and isinstance(only := segments[0], np.ndarray) and only.nbytes == data.nbytes:
        return [(only, data.view(only.dtype).reshape(only.shape))]  # the usual case, on a short path
    arrays = [np.asarray(segment) for segment in segments]
    total = sum(array.nbytes for array in arrays)
    if total != data.nbytes:
        raise ValueError(f"segments have {total} bytes together, expected {data.nbytes}")
    pairs: list[_Pair] = []
    start = 0
    for array in arrays:
        pairs.append((array, data[start : start + array.nbytes].view(array.dtype).reshape(array.shape)))
        start += array.nbytes
    return pairs


_LINE_BYTES = 64


def buffer(size: int) -> Bytes:
    """`size` bytes that begin at a cache line.

    NumPy's large arrays begin 16 bytes into a page. There some processors' string moves, with which the kernel copies
    files and sockets, are eight to twelve times slower: 2 GB/s instead of 18 to 24 (AMD EPYC, Linux 6.18).
    """
    memory = np.empty(size + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + size]
