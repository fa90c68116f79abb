"""Weight matrices in the layouts of ``fused_step/``: panels of output columns, whose kernels read one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from backend.model_loader.linears import Weight
from backend.quantized_weights.float_scheme import FloatLinear
from backend.quantized_weights.fp8_scheme import Fp8Linear
from backend.quantized_weights.int_scheme import IntLinear
from backend.quantized_weights.nf4_scheme import Nf4Linear
from backend.quantized_weights.nibbles import unpack_nibbles
from backend.runners.errors import RunnerUnavailable

KVPrecision = Literal["float16", "int8"]

GROUP = 32
"""Inputs of a row that are rounded with one scale where weights are integers or levels."""

_HALF_MAX = torch.finfo(torch.float16).max
_NOT_A_NUMBER = 0x7F
"""The bits of E4M3's one number that is none, without the sign."""
_BYTES_SCALE = 128
"""How many times larger scales are than what the kernel makes of them."""
_SMALL_FLOATS_SCALE = 256
"""How many times smaller the kernel reads E4M3."""


class Format(IntEnum):
    """What a panel holds; the numbers are those of ``fused_step/model.h``."""

    HALVES = 0
    BYTES = 1
    NIBBLES = 2
    SMALL_FLOATS = 3
    LEVELS = 4


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix in one of the layouts.

    Args:
        scales: float32, of the columns; None where there are none, or where they are in the panels.
        group: inputs that share a scale in the panels; 0 where a column has one, or none.
        kept_as: name of the weight's scheme, which says so where this layout is not its own.
    """

    format: Format
    panels: torch.Tensor
    scales: torch.Tensor | None
    group: int
    kept_as: str

    @property
    def nbytes(self) -> int:
        """Of everything, padding included."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)


def lay_out(weight: Weight, lanes: int, order: torch.Tensor | None = None) -> Panels:
    """A weight [out, in] in the layout of its scheme, or as half floats where its scheme, shape or order has none.

    Nothing is lost but what scales and minima lose as half floats, and the levels of NF4 as 127ths.

    Args:
        lanes: floats of a vector; a panel has twice as many columns.
        order: in which the rows that it is multiplied with are rounded, as in `IntLinear`; None: in their own.

    Raises:
        RunnerUnavailable: a weight or a scale is beyond the range of half floats, or no number.
    """
    if isinstance(weight, torch.Tensor):
        return _halves(weight, lanes, "float16")
    name, inputs = weight.scheme.name, weight.shape[1]
    match weight:
        case FloatLinear():
            return _halves(weight.weight, lanes, "float16")
        case IntLinear() if _has_nibbles(weight) and _same(weight.order, order):
            return _nibbles(weight, lanes)
        case IntLinear() if _has_bytes(weight) and (weight.scales.shape[1] == 1 or _same(weight.order, order)):
            return _bytes(weight, lanes, order)
        case Fp8Linear() if inputs % 2 == 0:
            return _small_floats(weight, lanes)
        case Nf4Linear() if weight.scheme.block_size % GROUP == 0 and order is None:
            return _levels(weight, lanes)
    return _halves(weight.unpack(), lanes, f"{name}-as-float16")


def common_order(weights: Sequence[Weight]) -> torch.Tensor | None:
    """The order in which rows should be rounded for weights that multiply the same ones: int32 [in], or None.

    It is that of the first weight that has to have one. A scale for each output goes with any order.

    Raises:
        RunnerUnavailable: it does not name each input once.
    """
    for weight in weights:
        if isinstance(weight, IntLinear) and weight.order is not None and _has_groups(weight):
            order = weight.order.to(torch.int32)
            if not torch.equal(order.sort().values, torch.arange(weight.shape[1], dtype=torch.int32)):
                raise RunnerUnavailable("the order of a weight's inputs does not name each of them once")
            return order
    return None


def rounds_rows(weight: Weight) -> bool:
    """Whether rows are rounded to int8 before they are multiplied with it, where its scheme has a layout."""
    return isinstance(weight, Nf4Linear) or (isinstance(weight, IntLinear) and weight.scheme.bits == 4)


def in_groups(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, ...] to [ceil(rows / size), size, ...], the last group padded with zeros."""
    missing = -tensor.shape[0] % size
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor.view(-1, size, *tensor.shape[1:])


def _has_nibbles(weight: IntLinear) -> bool:
    return weight.scheme.bits == 4 and weight.shape[1] // weight.scales.shape[1] % GROUP == 0


def _has_bytes(weight: IntLinear) -> bool:
    in_group = weight.shape[1] // weight.scales.shape[1]
    return (weight.scheme.bits, weight.scheme.zero) == (8, "middle") and in_group % GROUP == 0


def _has_groups(weight: IntLinear) -> bool:
    return _has_nibbles(weight) or (_has_bytes(weight) and weight.scales.shape[1] > 1)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _as_halves(numbers: torch.Tensor, what: str) -> torch.Tensor:
    low, high = torch.aminmax(numbers)
    if not -_HALF_MAX <= float(low) <= float(high) <= _HALF_MAX:
        raise RunnerUnavailable(f"{what} is beyond the range of half floats")
    return numbers.to(torch.float16)


def _halves(weight: torch.Tensor, lanes: int, name: str) -> Panels:
    """float16 [panels, in, columns]."""
    panels = in_groups(_as_halves(weight, "a weight"), 2 * lanes).transpose(1, 2)
    return Panels(Format.HALVES, panels.contiguous(), None, 0, name)


def _bytes(weight: IntLinear, lanes: int, order: torch.Tensor | None) -> Panels:
    """int8 [panels, in / 2, columns, 2]; or uint8 [panels, in / group, bytes]: these and scales."""
    codes, groups = weight.codes, weight.scales.shape[1]
    if not _same(weight.order, order):
        if weight.order is not None:
            codes = torch.empty_like(codes).index_copy_(1, weight.order.long(), codes)
        codes = codes if order is None else codes[:, order.long()]
    pairs = _words((codes.to(torch.int16) - weight.scheme.middle).to(torch.int8), 2, lanes)
    if groups == 1:
        scales = in_groups(weight.scales.float().squeeze(1), 2 * lanes).flatten()
        return Panels(Format.BYTES, pairs, scales, 0, weight.scheme.name)
    # Scales of small weights would lose bits as half floats.
    scales = _as_halves(weight.scales * _BYTES_SCALE, "a scale")
    of_columns = in_groups(scales, 2 * lanes).transpose(1, 2).contiguous()
    panels = torch.cat([part.view(torch.uint8).reshape(len(pairs), groups, -1) for part in (pairs, of_columns)], dim=-1)
    return Panels(Format.BYTES, panels, None, weight.shape[1] // groups, weight.scheme.name)


def _small_floats(weight: Fp8Linear, lanes: int) -> Panels:
    """uint8 [panels, in / 2, columns, 2], the second of two inputs first."""
    codes = weight.codes.view(torch.uint8)
    if bool(((codes & 0x7F) == _NOT_A_NUMBER).any()):
        raise RunnerUnavailable("a weight is not a number")
    scales = (weight.scales * _SMALL_FLOATS_SCALE).squeeze(1).expand(weight.shape[0])
    pairs = _words(codes, 2, lanes).flip(-1)
    return Panels(Format.SMALL_FLOATS, pairs, in_groups(scales, 2 * lanes).flatten(), 0, weight.scheme.name)


def _nibbles(weight: IntLinear, lanes: int) -> Panels:
    """uint8 [panels, in / group, bytes]: nibbles, scales and minima."""
    grid, group = weight.grid, weight.shape[1] // weight.scales.shape[1]
    numbers = torch.stack((_as_halves(grid.scales, "a scale"), _as_halves(grid.offsets, "a minimum")))
    panels = _groups(weight.plain_codes(), numbers, lanes)
    return Panels(Format.NIBBLES, panels, None, group, weight.scheme.name)


def _levels(weight: Nf4Linear, lanes: int) -> Panels:
    """uint8 [panels, in / block, bytes]: nibbles and scales."""
    scales = _as_halves(weight.scales.unpack().view(1, weight.shape[0], -1), "a scale")
    panels = _groups(unpack_nibbles(weight.codes), scales, lanes)
    return Panels(Format.LEVELS, panels, None, weight.scheme.block_size, weight.scheme.name)


def _words(codes: torch.Tensor, size: int, lanes: int) -> torch.Tensor:
    """[out, in] to [panels, in / size, columns, size]."""
    columns = in_groups(codes, 2 * lanes)
    return columns.view(*columns.shape[:2], -1, size).transpose(1, 2).contiguous()


def _groups(codes: torch.Tensor, numbers: torch.Tensor, lanes: int) -> torch.Tensor:
    """Codes of four bits, uint8 [out, in], and some float16 [some, out, groups] to uint8 [panels, groups, bytes].

    Two codes are a byte: those of one word of GROUP inputs in the low halves of a vector, those of the word four words
    later in the high halves.
    """
    columns, groups = in_groups(codes, 2 * lanes), numbers.shape[2]
    panels, inputs = columns.shape[0], columns.shape[2]
    words = columns.view(panels, 2, lanes, inputs // GROUP, GROUP // 4, 4).permute(0, 3, 1, 4, 2, 5)
    first, second = words.chunk(2, dim=3)
    both = (first | second << 4).reshape(panels, groups, -1)
    of_columns = in_groups(numbers.transpose(0, 1), 2 * lanes).permute(0, 3, 2, 1).contiguous()
    return torch.cat([both, of_columns.view(panels, groups, -1).view(torch.uint8)], dim=-1)
