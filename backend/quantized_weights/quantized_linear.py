"""The contracts of quantised weights, and of the schemes that make them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from backend.errors import ModelError

MAX_SCALE = 2.0**64
"""Largest magnitude of a scale, made or read: float32 holds its product with any code."""


class QuantizedLinear(Protocol):
    """The quantised weight [out, in] of a linear layer. Immutable and thread-safe."""

    @property
    def scheme(self) -> Scheme:
        """Its format."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, scales included."""

    def unpack(self) -> torch.Tensor:
        """Dequantised, float32 [out, in]."""

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """``x · unpack()ᵀ`` of rows [T, in]: [T, out] in the dtype of ``x``.

        If the scheme rounds activations, a row's result is the same alone and in any batch.
        """


class Scheme(Protocol):
    """A format of weights. Frozen and comparable: two with the same name are equal."""

    @property
    def name(self) -> str:
        """As in reports and ``/v1/model/info``."""

    @property
    def activation_bits(self) -> int:
        """Bits of the activations; 16: they are not rounded."""

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Of a weight of this shape, scales included."""

    def check(self, out_features: int, in_features: int) -> None:
        """Raises CannotQuantize if a weight of this shape does not fit."""

    def pack(self, weight: torch.Tensor) -> QuantizedLinear:
        """Rounds a weight [out, in] to nearest.

        Raises:
            CannotQuantize: its shape does not fit, or a value is not finite or beyond the range of the scales.
        """

    def error_bound(self, weight: torch.Tensor) -> torch.Tensor:
        """Bound of ``|pack(weight).unpack() - weight|``: float32, broadcastable to [out, in]."""


def check_range(scales: torch.Tensor, most: float = MAX_SCALE) -> None:
    """Raises CannotQuantize if the magnitude of a scale or a minimum, none of them NaN, is above ``most``."""
    if float(scales.abs().max()) > most:
        raise CannotQuantize(f"a weight is beyond the range of scales, which end at {most:g}")


def reference(linear: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """Reference for `QuantizedLinear.matmul` in float64, with activations rounded if the scheme does so."""
    rows = x.double() if linear.scheme.activation_bits == 16 else rounded_rows(x)
    return functional.linear(rows, linear.unpack().double())


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows [T, in] rounded to int8 and back: a scale for each, 127 steps on either side of zero; float64."""
    scales = row_scales(x).double()
    return torch.round(x.double() / scales) * scales


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """The int8 scale of each row, float32 [T, 1]; 1 where a row is all zeros."""
    most = x.float().abs().amax(dim=-1, keepdim=True)
    return torch.where(most > 0, most / 127, 1.0)


class CannotQuantize(ModelError):
    """A weight does not fit a scheme; the message names the size or value."""
