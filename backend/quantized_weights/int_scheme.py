"""Integer weights with a scale for each group of inputs: INT8 per channel, INT4 in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from backend.quantized_weights.grid import Grid
from backend.quantized_weights.quantized_linear import CannotQuantize, check_range, row_scales

Zero = Literal["middle", "integer", "minimum"]

_HALF_MAX = torch.finfo(torch.float16).max
_HALF_STEP = 2.0**-24
"""The smallest positive half float."""
_EXACT_INPUTS = 512
"""float32 holds the sum of this many products of int8 numbers exactly, and every partial sum."""


@dataclass(frozen=True, slots=True)
class IntScheme:
    """Codes of 4 or 8 bits.

    Args:
        bits: of a code.
        group_size: inputs that share a scale; None: all of an output do.
        zero: what is stored for zero. ``middle``: nothing, its code is 8 or 128 (symmetric): ``scale * (code - 8)``.
            ``integer``: the code of zero (asymmetric): ``scale * (code - zero)``. ``minimum``: the value of code 0,
            as in llama.cpp's Q4_1: ``scale * code + minimum``.
        activation_bits: 8: rows of activations are rounded to int8, with a scale each (dynamic).
    """

    bits: Literal[4, 8]
    group_size: int | None = None
    zero: Zero = "middle"
    activation_bits: Literal[8, 16] = 16

    @property
    def name(self) -> str:
        """Such as ``int8``, ``int8-dynamic``, ``int4-g128``, ``int4-asym-g64``, ``int4-min-g32``."""
        parts = [f"int{self.bits}"]
        if self.zero != "middle":
            parts.append("asym" if self.zero == "integer" else "min")
        if self.group_size is not None:
            parts.append(f"g{self.group_size}")
        if self.activation_bits == 8:
            parts.append("dynamic")
        return "-".join(parts)

    @property
    def levels(self) -> int:
        """The highest code; the lowest is 0."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The code of zero where none is stored."""
        return 1 << (self.bits - 1)

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales and minima."""
        return torch.float32 if self.group_size is None else torch.float16

    def groups(self, in_features: int) -> int:
        """Scales per output."""
        return 1 if self.group_size is None else in_features // self.group_size

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """See `Scheme.bits_per_weight`."""
        scale = 32 if self.group_size is None else 16
        zero = {"middle": 0, "integer": 8, "minimum": scale}[self.zero]
        return self.bits + self.groups(in_features) * (scale + zero) / in_features

    def check(self, out_features: int, in_features: int) -> None:
        """See `Scheme.check`."""
        if self.group_size is not None and in_features % self.group_size:
            raise CannotQuantize(
                f"{self.name} needs inputs in multiples of {self.group_size}, and these are {in_features}"
            )
        if in_features % 2:
            raise CannotQuantize(f"{self.name} needs an even number of inputs, and these are {in_features}")

    def grid(self, weight: torch.Tensor) -> Grid:
        """The grid that rounds a weight [out, in] to nearest, with scales and offsets as stored.

        Raises:
            CannotQuantize: as `pack`.
        """
        self.check(*weight.shape)
        low, high = torch.aminmax(weight.float().reshape(len(weight), self.groups(weight.shape[1]), -1), dim=-1)
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise CannotQuantize("a weight is not a finite number")
        return self.grid_of(low, high)

    def grid_of(self, low: torch.Tensor, high: torch.Tensor) -> Grid:
        """The grid from the lowest and the highest weight of each group, float32 [out, groups].

        Raises:
            CannotQuantize: they are beyond the range of the scales.
        """
        match self.zero:
            case "middle":
                scales = self._kept(torch.maximum(-low, high) / (self.levels / 2))
                return Grid(scales, -self.middle * scales, self.levels)
            case "integer":
                low, high = low.clamp(max=0), high.clamp(min=0)
                scales = self._kept((high - low) / self.levels)
                zeros = torch.round(-low / torch.where(scales > 0, scales, 1.0)).clamp(0, self.levels)
                return Grid(scales, -zeros * scales, self.levels)
            case "minimum":
                minima = self._kept(low)
                return Grid(self._kept((high - minima) / self.levels), minima, self.levels)

    def _kept(self, numbers: torch.Tensor) -> torch.Tensor:
        """Scales or minima, rounded to the stored dtype."""
        if self.group_size is None:
            check_range(numbers)
            return numbers
        check_range(numbers, _HALF_MAX)
        return numbers.to(torch.float16).float()

    def pack(self, weight: torch.Tensor) -> IntLinear:
        """See `Scheme.pack`."""
        grid = self.grid(weight)
        return IntLinear.of(self, grid.encode(weight), grid)

    def error_bound(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Scheme.error_bound`: half a step of its group, plus the rounding of scale and minimum."""
        scales = self.grid(weight).scales
        most = weight.float().reshape(*scales.shape, -1).abs().amax(dim=-1)
        rounding = 0.0 if self.group_size is None else 2 * most * 2.0**-11 + (self.levels + 1) * _HALF_STEP
        bound = scales / 2 + rounding + most * 2.0**-21
        return bound.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class IntLinear:
    """A weight in an `IntScheme`.

    Args:
        codes: uint8 [out, in], or [out, in / 2] with two 4-bit codes per byte (see `pack_nibbles`).
        scales: [out, groups]; float16 where there are groups, else float32.
        zeros: uint8 [out, groups], the codes of zero; None if the scheme stores none.
        minima: as ``scales``, the values of code 0; None if the scheme stores none.
        order: int32 [in]: column ``i`` of the codes belongs to input ``order[i]`` (GPTQ's act-order); None: to ``i``.
    """

    scheme: IntScheme
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    minima: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, scheme: IntScheme, codes: torch.Tensor, grid: Grid, order: torch.Tensor | None = None) -> IntLinear:
        """From codes uint8 [out, in], not packed, and their grid."""
        dtype = scheme.scale_dtype
        return cls(
            scheme,
            pack_nibbles(codes) if scheme.bits == 4 else codes.contiguous(),
            grid.scales.to(dtype).contiguous(),
            grid.zeros.clamp(0, scheme.levels).to(torch.uint8).contiguous() if scheme.zero == "integer" else None,
            grid.offsets.to(dtype).contiguous() if scheme.zero == "minimum" else None,
            order,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """See `QuantizedLinear.shape`."""
        return self.codes.shape[0], self.codes.shape[1] * (2 if self.scheme.bits == 4 else 1)

    @property
    def nbytes(self) -> int:
        """See `QuantizedLinear.nbytes`."""
        parts = (self.codes, self.scales, self.zeros, self.minima, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def grid(self) -> Grid:
        """The grid of the codes."""
        scales = self.scales.float()
        if self.minima is not None:
            return Grid(scales, self.minima.float(), self.scheme.levels)
        zeros = self.scheme.middle if self.zeros is None else self.zeros.float()
        return Grid(scales, -zeros * scales, self.scheme.levels)

    def plain_codes(self) -> torch.Tensor:
        """Unpacked codes uint8 [out, in], in stored order."""
        return unpack_nibbles(self.codes) if self.scheme.bits == 4 else self.codes

    def unpack(self) -> torch.Tensor:
        """See `QuantizedLinear.unpack`."""
        weight = self.grid.decode(self.plain_codes())
        return weight if self.order is None else torch.empty_like(weight).index_copy_(1, self.order.long(), weight)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantizedLinear.matmul`."""
        if self.scheme.activation_bits == 8:
            return self._int8_product(x)
        return functional.linear(x, self.unpack().to(x.dtype))

    def _int8_product(self, x: torch.Tensor) -> torch.Tensor:
        """Integer sums, exact in float32: independent of their order, and so of the batch."""
        if self.order is not None:
            x = x[:, self.order.long()]
        of_rows, grid, codes, middle = row_scales(x), self.grid, self.plain_codes(), self.scheme.middle
        rows = torch.round(x.float() / of_rows)
        width = x.shape[1] // self.scales.shape[1]
        total = torch.zeros(len(x), len(codes))
        for group, (scales, offsets) in enumerate(zip(grid.scales.T, grid.offsets.T, strict=True)):
            end = (group + 1) * width
            for first in range(group * width, end, _EXACT_INPUTS):
                part = slice(first, min(first + _EXACT_INPUTS, end))
                products = functional.linear(rows[:, part], codes[:, part].float() - middle)
                # weight = scale * (code - middle) + (offset + scale * middle)
                total += products * scales + rows[:, part].sum(1, keepdim=True) * (offsets + scales * middle)
        return (total * of_rows).to(x.dtype)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., n] with values below 16 to uint8 [..., n / 2]; n is even."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
