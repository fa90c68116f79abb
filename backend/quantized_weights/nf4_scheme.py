"""NormalFloat: four bits that index the quantiles of a normal distribution (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from backend.quantized_weights.int_scheme import pack_nibbles, unpack_nibbles
from backend.quantized_weights.quantized_linear import CannotQuantize, check_range

# Appendix E of the paper: quantiles of N(0, 1), with an exact zero, scaled to [-1, 1].
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_WIDEST = max(after - before for before, after in itertools.pairwise(LEVELS))
SCALES_PER_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Nf4Scheme:
    """``weight = scale of the block * LEVELS[code]``, blocks of consecutive weights, row after row.

    Args:
        block_size: weights that share a scale.
        double: whether the scales are stored in eight bits, with a scale for each 256 of them.
    """

    block_size: int = 64
    double: bool = True

    @property
    def name(self) -> str:
        """``nf4``, ``nf4-single``, or either with the block size at the end."""
        name = "nf4" if self.double else "nf4-single"
        return name if self.block_size == 64 else f"{name}-b{self.block_size}"

    @property
    def activation_bits(self) -> int:
        """See `Scheme.activation_bits`."""
        return 16

    def bits_per_weight(self, out_features: int, in_features: int) -> float:
        """See `Scheme.bits_per_weight`."""
        blocks = out_features * in_features // self.block_size
        of_scales = 8 * blocks + 32 * -(-blocks // SCALES_PER_BLOCK) + 32 if self.double else 32 * blocks
        return 4 + of_scales / (out_features * in_features)

    def check(self, out_features: int, in_features: int) -> None:
        """See `Scheme.check`."""
        if in_features % self.block_size:
            raise CannotQuantize(
                f"{self.name} needs inputs in multiples of {self.block_size}, and these are {in_features}"
            )

    def pack(self, weight: torch.Tensor) -> Nf4Linear:
        """See `Scheme.pack`."""
        self.check(*weight.shape)
        blocks = weight.float().reshape(-1, self.block_size)
        scales = blocks.abs().amax(dim=1)
        if not bool(torch.isfinite(scales).all()):
            raise CannotQuantize("a weight is not a finite number")
        check_range(scales)
        kept = BlockScales.of(scales, self.double)
        steps = kept.unpack()
        levels = torch.tensor(LEVELS, dtype=torch.float32)
        middles = (levels[1:] + levels[:-1]) / 2
        # A block whose scale is rounded to zero or less becomes all zeros.
        codes = torch.bucketize(blocks / torch.where(steps > 0, steps, math.inf).unsqueeze(1), middles)
        return Nf4Linear(self, pack_nibbles(codes.to(torch.uint8).view(weight.shape)), kept)

    def error_bound(self, weight: torch.Tensor) -> torch.Tensor:
        """See `Scheme.error_bound`: half of the widest gap, plus what a scale rounded down cuts off."""
        scales = weight.float().reshape(-1, self.block_size).abs().amax(dim=1)
        steps = BlockScales.of(scales, self.double).unpack()
        bound = steps.clamp(min=0) * _WIDEST / 2 + (scales - steps).clamp(min=0) + scales * 2.0**-20
        return bound.view(weight.shape[0], -1).repeat_interleave(self.block_size, dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class BlockScales:
    """Scales of blocks, optionally in eight bits: ``scale = table[code] * scale of 256 + offset``.

    Args:
        codes: uint8 [blocks]; or float32 [blocks], the scales, if nothing else is given.
        table: float32 [256].
        of_scales: float32 [blocks / 256, rounded up].
        offset: mean of all scales.
    """

    codes: torch.Tensor
    table: torch.Tensor | None = None
    of_scales: torch.Tensor | None = None
    offset: float = 0.0

    @classmethod
    def of(cls, scales: torch.Tensor, double: bool) -> BlockScales:
        """From scales float32 [blocks], rounded to nearest in eight bits if ``double``."""
        if not double:
            return cls(scales)
        offset = float(scales.mean())
        padded = functional.pad(scales - offset, (0, -len(scales) % SCALES_PER_BLOCK)).view(-1, SCALES_PER_BLOCK)
        most = padded.abs().amax(dim=1)
        table = torch.linspace(-1, 1, 256)
        middles = (table[1:] + table[:-1]) / 2
        codes = torch.bucketize(padded / torch.where(most > 0, most, 1.0).unsqueeze(1), middles)
        return cls(codes.to(torch.uint8).flatten()[: len(scales)].contiguous(), table, most, offset)

    @property
    def nbytes(self) -> int:
        """Bytes stored, without the table, which is shared."""
        return self.codes.nbytes + (0 if self.of_scales is None else self.of_scales.nbytes + 4)

    def unpack(self) -> torch.Tensor:
        """float32 [blocks]."""
        if self.table is None or self.of_scales is None:
            return self.codes
        each = self.of_scales.repeat_interleave(SCALES_PER_BLOCK)[: len(self.codes)]
        return self.table[self.codes.long()] * each + self.offset


@dataclass(frozen=True, slots=True, eq=False)
class Nf4Linear:
    """A weight in an `Nf4Scheme`.

    Args:
        codes: uint8 [out, in / 2], see `pack_nibbles`.
        scales: of blocks, row after row.
    """

    scheme: Nf4Scheme
    codes: torch.Tensor
    scales: BlockScales

    @property
    def shape(self) -> tuple[int, int]:
        """See `QuantizedLinear.shape`."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def nbytes(self) -> int:
        """See `QuantizedLinear.nbytes`."""
        return self.codes.nbytes + self.scales.nbytes

    def unpack(self) -> torch.Tensor:
        """See `QuantizedLinear.unpack`."""
        levels = torch.tensor(LEVELS, dtype=torch.float32)[unpack_nibbles(self.codes).long()]
        blocks = levels.view(-1, self.scheme.block_size) * self.scales.unpack().unsqueeze(1)
        return blocks.view(self.shape)

    def matmul(self, x: torch.Tensor) -> torch.Tensor:
        """See `QuantizedLinear.matmul`: widened first, as a CPU has no instructions for NF4."""
        return functional.linear(x, self.unpack().to(x.dtype))
