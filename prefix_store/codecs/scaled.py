"""One byte per element and a scale per group of elements: int8 and fp8.

int8 follows KIVI (arXiv 2402.02750): outliers of keys are in a few channels, so keys share a scale along the tokens of
a block, values along the dimensions of a token. fp8 is e4m3, whose range suffices for a scale per token and head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prefix_store.codecs.codec import CannotEncode
from prefix_store.frames.layout import BlockLayout
from prefix_store.frames.segments import Bytes, Segments, gather, scatter

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_BYTES = 2
_SOURCES = ("float16", "bfloat16", "float32")
_TOKENS, _DIMENSIONS = 2, 3
# torch computes up to 32,768 elements in the calling thread; for more it would use cores of the engine's step.
_MAX_ELEMENTS = 32_768
_SMALLEST_SCALE = 2.0**-133  # of bfloat16
# e4m3 bits shifted to their positions in a float32 give a number that is too small by this factor.
_E4M3_BIAS = 2.0**120
_E4M3_MASK = -0x7810_0000  # sign, four bits of exponent, three of mantissa


class _Piece(NamedTuple):
    """Some layers of the keys or of the values [L, H, T, D], their stored bytes, and their scales."""

    numbers: Tensor
    stored: Tensor
    scales: Tensor
    shared_along: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """A symmetric codec: an element is a byte times the bfloat16 scale of its group.

    With s the scale of the group and m the largest magnitude in it, s is at most 1.008 · m / largest (or 2⁻¹³³ where
    that is more), and an element x is decoded as y with |x - y| at most

        int8: s / 2
        fp8:  the larger of |x| / 16 and s / 1024

    plus the rounding of y to the block's dtype (|y| / 2048 in float16, |y| / 256 in bfloat16).

    Payload: keys [L, H, T, D], values [L, H, T, D], a byte each; then scales of the keys and of the values, bfloat16,
    in the same order without the axis along which they are shared.

    Args:
        largest: magnitude that the byte can hold.
        is_float: the byte is an e4m3 number; else an integer.
        keys_along: the axis (2 tokens, 3 dimensions) along which keys share a scale; values share along dimensions.
    """

    name: str
    number: int
    largest: float
    is_float: bool
    keys_along: int

    @property
    def is_exact(self) -> bool:
        """Never."""
        return False

    def payload_bytes(self, layout: BlockLayout) -> int:
        """With 16 tokens and 64 dimensions .54 (int8) or .52 (fp8) of float16. Raises ValueError."""
        if layout.dtype not in _SOURCES or not layout.axes:
            raise ValueError(
                f"{self.name} cannot store a block of dtype {layout.dtype} and axes {layout.axes!r}, "
                f"expected one of {', '.join(_SOURCES)} whose axes are known"
            )
        return sum(self._sizes(layout))

    def encode(self, segments: Segments, layout: BlockLayout, payload: Bytes) -> None:
        """Raises CannotEncode if an element is infinite or NaN: its group would have no usable scale."""
        block = np.empty(layout.nbytes, np.uint8)
        gather(segments, block)
        for piece in self._pieces(block, payload, layout):
            self._encode(piece)

    def decode(self, payload: Bytes, layout: BlockLayout, into: Segments) -> None:
        """Numbers in the block's dtype; none is infinite."""
        block = np.empty(layout.nbytes, np.uint8)
        for piece in self._pieces(block, payload, layout):
            self._decode(piece)
        scatter(block, into)

    def _encode(self, piece: _Piece) -> None:
        import torch

        numbers = piece.numbers.float()
        most = numbers.abs().amax(piece.shared_along, keepdim=True)
        if not bool(torch.isfinite(most).all()):
            raise CannotEncode(f"{self.name} holds no infinite numbers, and this block has some")
        # Rounded up to bfloat16, so that no element exceeds the largest magnitude of its byte.
        scales = ((most / self.largest).view(torch.int32) + 0xFFFF).bitwise_and_(-0x1_0000).view(torch.float32)
        scales.clamp_(min=_SMALLEST_SCALE)
        quotients = (numbers / scales).clamp_(-self.largest, self.largest)
        if self.is_float:
            piece.stored.view(torch.float8_e4m3fn).copy_(quotients)
        else:
            piece.stored.copy_(quotients.round_())
        piece.scales.copy_(scales)

    def _decode(self, piece: _Piece) -> None:
        import torch

        if self.is_float:
            bits = piece.stored.int().bitwise_left_shift_(20).bitwise_and_(_E4M3_MASK)
            numbers = bits.view(torch.float32).mul_(_E4M3_BIAS)
        else:
            numbers = piece.stored.float()
        numbers.mul_(piece.scales)
        most = torch.finfo(piece.numbers.dtype).max  # a scale that was rounded up may exceed it slightly
        piece.numbers.copy_(numbers.clamp_(-most, most))

    def _sizes(self, layout: BlockLayout) -> tuple[int, int, int, int]:
        """Bytes of keys, values, scales of the keys, scales of the values."""
        layers, heads, tokens, dimensions = (layout.size(axis) for axis in "lhtd")
        vectors = layers * heads * tokens
        shared = tokens if self.keys_along == _TOKENS else dimensions
        elements = vectors * dimensions
        return elements, elements, elements // shared * _SCALE_BYTES, vectors * _SCALE_BYTES

    def _pieces(self, block: Bytes, payload: Bytes, layout: BlockLayout) -> Iterator[_Piece]:
        """A block, in pieces that one thread computes."""
        import torch

        parts = torch.split(torch.from_numpy(payload.view(np.int8)), list(self._sizes(layout)))
        for part, numbers in enumerate(keys_and_values(block, layout)):
            along = self.keys_along if part == 0 else _DIMENSIONS
            of_scales = list(numbers.shape)
            of_scales[along] = 1
            stored = parts[part].view(numbers.shape)
            scales = parts[part + 2].view(torch.bfloat16).view(of_scales)
            layers = max(1, _MAX_ELEMENTS // numbers[0].numel())
            pieces = (torch.split(tensor, layers) for tensor in (numbers, stored, scales))
            for some, their_bytes, their_scales in zip(*pieces, strict=True):
                yield _Piece(some, their_bytes, their_scales, along)


INT8 = Scaled("int8", 1, 127.0, is_float=False, keys_along=_TOKENS)
FP8 = Scaled("fp8", 2, 448.0, is_float=True, keys_along=_DIMENSIONS)


if TYPE_CHECKING:
    from torch import Tensor


def keys_and_values(block: Bytes, layout: BlockLayout) -> tuple[Tensor, Tensor]:
    """Views [layers, kv heads, tokens, dimensions] of a block's bytes, in the layout's dtype.

    The layout must have axes.
    """
    import torch

    # NumPy has no bfloat16, so torch reinterprets the bytes.
    numbers = torch.from_numpy(block).view(getattr(torch, layout.dtype)).view(layout.shape)
    part = layout.axes.index("p")
    keys, values = numbers.select(part, 0), numbers.select(part, 1)
    if layout.keys_transposed:
        keys = keys.view(*keys.shape[:-2], layout.size("d"), layout.size("t")).transpose(-1, -2)
    order = [layout.axes.replace("p", "").index(axis) for axis in "lhtd"]
    return keys.permute(order), values.permute(order)
