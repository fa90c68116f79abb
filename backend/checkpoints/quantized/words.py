"""Codes in words of 32 bits, the first in the lowest bits, as GPTQ, AWQ and compressed-tensors keep them."""

from __future__ import annotations

import torch
from torch.nn import functional

from backend.quantized_weights.nibbles import pack_nibbles, unpack_nibbles


def words_of(count: int, bits: int) -> int:
    """Words that so many codes take."""
    return -(-count * bits // 32)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., n] to int32 [..., words], filled up with zeros.

    Args:
        bits: 4 or 8.
    """
    padded = functional.pad(codes, (0, -codes.shape[-1] % (32 // bits)))
    return _rows(pack_nibbles(padded) if bits == 4 else padded).view(torch.int32)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack_words`: the first ``count`` codes of each row, uint8 [..., count]."""
    # The bytes of a word lie lowest first on every machine that this runs on.
    packed = _rows(words).view(torch.uint8)
    return (unpack_nibbles(packed) if bits == 4 else packed)[..., :count]


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """In memory row after row. What has one column counts as contiguous whatever its strides, so it is copied."""
    return tensor.clone(memory_format=torch.contiguous_format)
