"""The contract of every weight that is kept in fewer bits, and of the schemes that make them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from backend.errors import ModelError

MAX_SCALE = 2.0**64
"""How far from zero a scale may be, made or read: no product with a code is beyond float32."""


class QuantizedLinear(Protocol):
    """The weight [out, in] of a linear layer as it is kept. Immutable; any thread may use it."""

    @property
    def scheme(self) -> Scheme:
        """How it is kept."""

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept, scales included."""

    def unpack(self) -> torch.Tensor:
        """What the bits say, float32 [out, in]."""

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """``x · weightᵀ`` of rows [T, in], by what the bits say: [T, out] in the dtype of ``x``.

        Where the scheme rounds activations too, a row's result is the same alone and in any batch.
        """


class Scheme(Protocol):
    """A way to keep weights. Frozen and comparable: two with the same name are equal."""

    @property
    def name(self) -> str:
        """As reports and ``/v1/model/info`` have it."""

    @property
    def activation_bits(self) -> int:
        """Of what is multiplied with the weights; 16 where they are left as they are."""

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """Of a weight of this shape, scales included."""

    def check(self, out_features: int, in_features: int) -> None:
        """Raises CannotQuantize where no weight of this shape can be kept so."""

    def pack(self, weight: torch.Tensor) -> QuantizedLinear:
        """Rounds a weight [out, in] to the nearest there is.

        Raises:
            CannotQuantize: its shape does not fit, or a value is not finite or beyond the range of the scales.
        """

    def error_bound(self, weight: torch.Tensor) -> torch.Tensor:
        """How far ``pack(weight).unpack()`` may be from ``weight``: float32, broadcastable to [out, in]."""


def check_range(scales: torch.Tensor, most: float = MAX_SCALE) -> None:
    """Raises CannotQuantize where a scale or a minimum, none of them NaN, is further from zero than ``most``."""
    if float(scales.abs().max()) > most:
        raise CannotQuantize(f"a weight is beyond the range of scales, which end at {most:g}")


def reference(linear: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """What `QuantizedLinear.matmul` is compared with: plain float64, activations rounded where the scheme says so."""
    rows = x.double() if linear.scheme.activation_bits == 16 else rounded_rows(x)
    return functional.linear(rows, linear.unpack().double())


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Rows [T, in] as int8 products see them: each its own scale, 127 steps to either side of zero; float64."""
    scales = row_scales(x).double()
    return torch.round(x.double() / scales) * scales


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """The int8 scale of each row, float32 [T, 1]; 1 where a row is all zeros."""
    most = x.float().abs().amax(dim=-1, keepdim=True)
    return torch.where(most > 0, most / 127, 1.0)


class CannotQuantize(ModelError):
    """A weight cannot be kept in a scheme; the message says which size or value is in the way."""
