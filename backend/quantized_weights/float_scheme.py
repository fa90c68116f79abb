"""Sixteen-bit floats, for weights that are not quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from backend.quantized_weights.quantized_linear import CannotQuantize

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class FloatScheme:
    """Weights as bfloat16 or float16."""

    name: Literal["bfloat16", "float16"] = "bfloat16"

    @property
    def activation_bits(self) -> int:
        """See `Scheme.activation_bits`."""
        return 16

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """See `Scheme.bits_per_weight`."""
        return 16

    def check(self, out_features: int, in_features: int) -> None:
        """See `Scheme.check`: any shape fits."""

    def pack(self, weight: torch.Tensor) -> FloatLinear:
        """See `Scheme.pack`."""
        packed = weight.to(_DTYPES[self.name])
        if not bool(torch.isfinite(packed).all()):
            raise CannotQuantize(f"a weight is not a finite number, or beyond the range of {self.name}")
        return FloatLinear(self, packed)

    def error_bound(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Scheme.error_bound`."""
        about = torch.finfo(_DTYPES[self.name])
        return torch.maximum(weight.float().abs() * about.eps / 2, torch.tensor(about.smallest_normal * about.eps / 2))


@dataclass(frozen=True, slots=True, eq=False)
class FloatLinear:
    """A weight [out, in] in a `FloatScheme`."""

    scheme: FloatScheme
    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """See `QuantizedLinear.shape`."""
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """See `QuantizedLinear.nbytes`."""
        return self.weight.nbytes

    def unpack(self) -> torch.Tensor:
        """See `QuantizedLinear.unpack`."""
        return self.weight.float()

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantizedLinear.matmul`."""
        return functional.linear(x, self.weight.to(x.dtype))
