"""Codes of four bits, two to a byte: the first in the low half."""

from __future__ import annotations

import torch


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] with values below 16 to uint8 [..., n / 2]; n is even."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
