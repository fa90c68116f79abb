"""Integer weights with a scale for each group of inputs: INT8 per channel, INT4 in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from backend.quantization.errors import CannotQuantize
from backend.quantization.nibbles import pack_nibbles, unpack_nibbles
from backend.quantization.quantized_linear import row_scales

_HALF_MAX = torch.finfo(torch.float16).max
_EXACT_INPUTS = 512
"""So many products of two int8 numbers have a sum that float32 holds exactly, and so has every part of it."""
_HALF_STEP = 2.0**-24
"""The smallest half float: below it a scale is none."""


@dataclass(frozen=True, slots=True)
class IntScheme:
    """``weight = scale * (code - zero)``, codes of 4 or 8 bits.

    Args:
        bits: of a code.
        group_size: inputs that share a scale; None: all of an output do.
        symmetric: whether the zero is in the middle, 8 or 128, and not kept.
        activation_bits: 8: rows are rounded to int8 with a scale each before they are multiplied (dynamic).
    """

    bits: Literal[4, 8]
    group_size: int | None = None
    symmetric: bool = True
    activation_bits: Literal[8, 16] = 16

    @property
    def name(self) -> str:
        """Such as ``int8``, ``int8-dynamic``, ``int4-g128``, ``int4-asym-g64``."""
        parts = [f"int{self.bits}"]
        if not self.symmetric:
            parts.append("asym")
        if self.group_size is not None:
            parts.append(f"g{self.group_size}")
        if self.activation_bits == 8:
            parts.append("dynamic")
        return "-".join(parts)

    @property
    def levels(self) -> int:
        """Steps between the lowest code and the highest."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero of symmetric codes."""
        return 1 << (self.bits - 1)

    def groups(self, in_features: int) -> int:
        """Scales of an output."""
        return 1 if self.group_size is None else in_features // self.group_size

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """See `Scheme.bits_per_weight`."""
        scale = 32 if self.group_size is None else 16
        zero = 0 if self.symmetric else 8
        return self.bits + self.groups(in_features) * (scale + zero) / in_features

    def check(self, out_features: int, in_features: int) -> None:
        """See `Scheme.check`."""
        if self.group_size is not None and in_features % self.group_size:
            raise CannotQuantize(
                f"{self.name} needs inputs in multiples of {self.group_size}, and these are {in_features}"
            )
        if in_features % 2:
            raise CannotQuantize(f"{self.name} needs an even number of inputs, and these are {in_features}")

    def grid(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The scales and zeros that round a weight [out, in] to the nearest: [out, groups], float32 and uint8.

        Scales are what the kept ones say, so codes make up for their rounding.

        Raises:
            CannotQuantize: as `pack`.
        """
        self.check(*weight.shape)
        columns = weight.float().reshape(len(weight), self.groups(weight.shape[1]), -1)
        low, high = torch.aminmax(columns, dim=-1)
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise CannotQuantize("a weight is not a finite number")
        if self.symmetric:
            scales = torch.maximum(-low, high) / (self.levels / 2)
        else:
            low, high = low.clamp(max=0), high.clamp(min=0)
            scales = (high - low) / self.levels
        if self.group_size is not None:
            if float(scales.max()) > _HALF_MAX:
                raise CannotQuantize("a weight is beyond the range of half-float scales")
            scales = scales.to(torch.float16).float()
        if self.symmetric:
            zeros = torch.full_like(scales, self.middle)
        else:
            zeros = torch.round(-low / torch.where(scales > 0, scales, 1.0)).clamp(0, self.levels)
        return scales, zeros.to(torch.uint8)

    def encode(self, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
        """The nearest codes of weights, uint8; all three of the same shape, or broadcastable to the weights'."""
        steps = torch.where(scales > 0, scales, 1.0)
        codes = torch.round(weight.float() / steps) + zeros.float()
        return torch.where(scales > 0, codes, zeros.float()).clamp(0, self.levels).to(torch.uint8)

    def pack(self, weight: torch.Tensor) -> IntLinear:
        """See `Scheme.pack`."""
        scales, zeros = self.grid(weight)
        columns = weight.reshape(*scales.shape, -1)
        codes = self.encode(columns, scales.unsqueeze(-1), zeros.unsqueeze(-1)).flatten(1)
        return IntLinear.of(self, codes, scales, zeros)

    def error_bound(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Scheme.error_bound`: half a step of its group, and what the scale's own rounding adds at the ends."""
        scales, _ = self.grid(weight)
        most = weight.float().reshape(*scales.shape, -1).abs().amax(dim=-1)
        rounding = 0.0 if self.group_size is None else most * 2.0**-11 + self.levels * _HALF_STEP
        bound = scales / 2 + rounding + most * 2.0**-22
        return bound.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class IntLinear:
    """A weight in an `IntScheme`.

    Args:
        codes: uint8 [out, in], or [out, in / 2] with two codes of four bits to a byte (see `nibbles`).
        scales: [out, groups]; float16 where there are groups, else float32.
        zeros: uint8 [out, groups]; None where the scheme is symmetric.
        order: int32 [in]: column ``i`` of the codes belongs to input ``order[i]`` (GPTQ's act-order); None: to ``i``.
    """

    scheme: IntScheme
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        scheme: IntScheme,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        order: torch.Tensor | None = None,
    ) -> IntLinear:
        """From codes uint8 [out, in], not packed, and scales and zeros [out, groups]."""
        return cls(
            scheme,
            pack_nibbles(codes) if scheme.bits == 4 else codes,
            scales.to(torch.float32 if scheme.group_size is None else torch.float16).contiguous(),
            None if scheme.symmetric else zeros.to(torch.uint8).contiguous(),
            order,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """See `QuantizedLinear.shape`."""
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.scheme.bits == 4 else 1)

    @property
    def nbytes(self) -> int:
        """See `QuantizedLinear.nbytes`."""
        return sum(part.nbytes for part in (self.codes, self.scales, self.zeros, self.order) if part is not None)

    def plain_codes(self) -> torch.Tensor:
        """uint8 [out, in], in the order in which they are kept."""
        return unpack_nibbles(self.codes) if self.scheme.bits == 4 else self.codes

    def plain_zeros(self) -> torch.Tensor:
        """uint8 [out, groups]."""
        return torch.full_like(self.scales, self.scheme.middle, dtype=torch.uint8) if self.zeros is None else self.zeros

    def unpack(self) -> torch.Tensor:
        """See `QuantizedLinear.unpack`."""
        codes = self.plain_codes().view(*self.scales.shape, -1).float()
        weight = (self.scales.float().unsqueeze(-1) * (codes - self.plain_zeros().float().unsqueeze(-1))).flatten(1)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantizedLinear.matmul`."""
        if self.scheme.activation_bits == 8:
            return self._int8_product(x)
        return functional.linear(x, self.unpack().to(x.dtype))

    def _int8_product(self, x: torch.Tensor) -> torch.Tensor:
        """Exact sums of integers, in floats that hold them: the same in any order, so the same in any batch."""
        if self.order is not None:
            x = x[:, self.order.long()]
        scales = row_scales(x)
        rows = torch.round(x.float() / scales)
        codes = self.plain_codes()
        total = torch.zeros(len(x), len(codes))
        for group, (scale, zero) in enumerate(zip(self.scales.float().T, self.plain_zeros().float().T, strict=True)):
            width = x.shape[1] // self.scales.shape[1]
            for first in range(group * width, (group + 1) * width, _EXACT_INPUTS):
                part = slice(first, min(first + _EXACT_INPUTS, (group + 1) * width))
                total += functional.linear(rows[:, part], codes[:, part].float() - zero.unsqueeze(1)) * scale
        return (total * scales).to(x.dtype)
