"""Eight-bit floats: E4M3, four bits of exponent and three of mantissa (arXiv 2209.05433)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from backend.quantized_weights.quantized_linear import CannotQuantize, check_range

_MAX = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_STEP = 2.0**-9
"""Between subnormal numbers."""
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal
"""With it, weights near zero become zero; a scale of 0 would make them NaN."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """``weight = scale * code``.

    Args:
        scaled: what shares a scale: the whole weight (tensor) or each output (row).
    """

    scaled: Literal["tensor", "row"] = "row"

    @property
    def name(self) -> str:
        """``fp8`` (a scale for each row) or ``fp8-tensor``."""
        return "fp8" if self.scaled == "row" else "fp8-tensor"

    @property
    def activation_bits(self) -> int:
        """See `Scheme.activation_bits`."""
        return 16

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """See `Scheme.bits_per_weight`."""
        scales = out_features if self.scaled == "row" else 1
        return 8 + 32 * scales / (out_features * in_features)

    def check(self, out_features: int, in_features: int) -> None:
        """See `Scheme.check`: any shape fits."""

    def pack(self, weight: torch.Tensor) -> Fp8Linear:
        """See `Scheme.pack`."""
        scales = self._scales(weight)
        return Fp8Linear(self, (weight.float() / scales).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn), scales)

    def error_bound(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Scheme.error_bound`: half of the last of four bits, or half a step of subnormal numbers."""
        return torch.maximum(weight.float().abs() * 2.0**-4, self._scales(weight) * _SMALLEST_STEP / 2) * (1 + 2.0**-20)

    def _scales(self, weight: torch.Tensor) -> torch.Tensor:
        most = weight.float().abs().amax(dim=-1, keepdim=True)
        if self.scaled == "tensor":
            most = most.amax(dim=0, keepdim=True)
        if not bool(torch.isfinite(most).all()):
            raise CannotQuantize("a weight is not a finite number")
        scales = torch.where(most > 0, (most / _MAX).clamp(min=_SMALLEST_SCALE), 1.0)
        check_range(scales)
        return scales


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear:
    """A weight in an `Fp8Scheme`.

    Args:
        codes: float8_e4m3fn [out, in].
        scales: float32 [out, 1] or [1, 1].
    """

    scheme: Fp8Scheme
    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """See `QuantizedLinear.shape`."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """See `QuantizedLinear.nbytes`."""
        return self.codes.nbytes + self.scales.nbytes

    def unpack(self) -> torch.Tensor:
        """See `QuantizedLinear.unpack`."""
        return self.codes.float() * self.scales

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantizedLinear.matmul`: a CPU has no instructions for these floats, so they are widened first."""
        return functional.linear(x, self.codes.to(x.dtype)) * self.scales.to(x.dtype).squeeze(1)
