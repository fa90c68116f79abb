"""Packs weight matrices for the kernels in ``step/``: panels of output columns that a kernel reads as one stream."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch

from backend.model_loader.linears import Weight
from backend.quantized_weights.float_scheme import FloatLinear
from backend.quantized_weights.fp8_scheme import Fp8Linear
from backend.quantized_weights.int_scheme import IntLinear, unpack_nibbles
from backend.quantized_weights.nf4_scheme import Nf4Linear
from backend.runners.errors import RunnerUnavailable

KVPrecision = Literal["float16", "int8"]
FloatPrecision = Literal["auto", "float16", "bfloat16"]
"""Of weights that are not quantised. With ``auto`` those released in bfloat16 stay so where kernels multiply them."""

GROUP = 32
"""Inputs of a row of activations that share a quantisation scale."""

_HALF_MAX = torch.finfo(torch.float16).max
_E4M3_NAN = 0x7F
"""Bits of NaN in E4M3, without the sign."""
_INT8_SCALE = 128
"""The kernel divides int8 scales by this."""
_FP8_SCALE = 256
"""The kernel reads E4M3 values divided by this."""


class Format(IntEnum):
    """Format of the weights in a panel; the numbers are those of ``step/model.h``."""

    FLOAT16 = 0
    INT8 = 1
    INT4 = 2
    FP8 = 3
    NF4 = 4
    BFLOAT16 = 5


@dataclass(frozen=True, slots=True)
class Kernels:
    """What the kernels were built for, which decides how weights are laid out.

    Args:
        instructions: their name, for people.
        lanes: floats of a SIMD vector; a panel has twice as many columns.
        byte_dots: whether products of bytes are added up by fours; INT8 then has a layout for it.
        bfloat16_dots: whether an instruction adds up products of bfloat16.
    """

    instructions: str
    lanes: int
    byte_dots: bool
    bfloat16_dots: bool

    @classmethod
    def of(cls, library: ctypes.CDLL) -> Kernels:
        """Those of a built library."""
        library.fused_instructions.restype = ctypes.c_char_p
        return cls(
            library.fused_instructions().decode(),
            library.fused_lanes(),
            bool(library.fused_byte_dots()),
            bool(library.fused_bfloat16_dots()),
        )


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix in one of the layouts.

    Args:
        scales: float32 [padded outputs]; None: there are none, or they are in the panels.
        group: inputs that share a scale in the panels; 0: a column has one scale, or none.
        stored_as: name of the weight's scheme, with ``-as-float16`` if this format is not its own.
    """

    format: Format
    panels: torch.Tensor
    scales: torch.Tensor | None
    group: int
    stored_as: str

    @property
    def nbytes(self) -> int:
        """Of everything, padding included."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pack_panels(
    weight: Weight, kernels: Kernels, order: torch.Tensor | None = None, floats: FloatPrecision = "auto"
) -> Panels:
    """Packs a weight [out, in] in the format of its scheme, or as float16 if its scheme, shape or order has none.

    Only scales and minima, stored as float16, the levels of NF4, stored as 127ths, and floats in fewer bits than they
    came in lose precision.

    Args:
        order: input order of the quantised activations, as in `IntLinear`; None: unchanged.

    Raises:
        RunnerUnavailable: a weight or a scale is NaN or outside the range of float16.
    """
    lanes = kernels.lanes
    if isinstance(weight, torch.Tensor):
        return _pack_floats(weight, kernels, floats)
    name, inputs = weight.scheme.name, weight.shape[1]
    match weight:
        case FloatLinear():
            return _pack_floats(weight.weight, kernels, floats)
        case IntLinear() if _fits_int4(weight) and _same_order(weight.order, order):
            return _pack_int4(weight, lanes)
        case IntLinear() if _fits_int8(weight) and (weight.scales.shape[1] == 1 or _same_order(weight.order, order)):
            return _pack_int8(weight, kernels, order)
        case Fp8Linear() if inputs % 2 == 0:
            return _pack_fp8(weight, lanes)
        case Nf4Linear() if weight.scheme.block_size % GROUP == 0 and order is None:
            return _pack_nf4(weight, lanes)
    return _pack_float16(weight.unpack(), lanes, f"{name}-as-float16")


def shared_order(weights: Sequence[Weight]) -> torch.Tensor | None:
    """The input order for weights that multiply the same activations: int32 [in], or None.

    The first weight that needs an order decides. Weights with one scale for each output accept any order.

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


def rounds_rows_coarsely(weight: Weight, kernels: Kernels) -> bool:
    """Whether activations are rounded to one byte or, in large groups, to two, if the scheme has a format."""
    if isinstance(weight, IntLinear):
        return weight.scheme.bits == 4 or kernels.byte_dots
    return isinstance(weight, Nf4Linear)


def pad_to_groups(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, ...] to [ceil(rows / size), size, ...], the last group padded with zeros."""
    missing = -tensor.shape[0] % size
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor.view(-1, size, *tensor.shape[1:])


def _fits_int4(weight: IntLinear) -> bool:
    return weight.scheme.bits == 4 and weight.shape[1] // weight.scales.shape[1] % GROUP == 0


def _fits_int8(weight: IntLinear) -> bool:
    in_group = weight.shape[1] // weight.scales.shape[1]
    return (weight.scheme.bits, weight.scheme.zero) == (8, "middle") and in_group % GROUP == 0


def _has_groups(weight: IntLinear) -> bool:
    return _fits_int4(weight) or (_fits_int8(weight) and weight.scales.shape[1] > 1)


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _to_float16(numbers: torch.Tensor, what: str) -> torch.Tensor:
    low, high = torch.aminmax(numbers)
    if not -_HALF_MAX <= float(low) <= float(high) <= _HALF_MAX:
        raise RunnerUnavailable(f"{what} is NaN or outside the range of float16")
    return numbers.to(torch.float16)


def _pack_floats(weight: torch.Tensor, kernels: Kernels, floats: FloatPrecision) -> Panels:
    wanted = floats == "bfloat16" or (floats == "auto" and weight.dtype == torch.bfloat16)
    if not (wanted and kernels.bfloat16_dots and weight.shape[1] % GROUP == 0):
        return _pack_float16(weight, kernels.lanes, "float16")
    rounded = weight.to(torch.bfloat16)
    if not bool(torch.isfinite(rounded).all()):
        raise RunnerUnavailable("a weight is NaN or outside the range of bfloat16")
    return Panels(Format.BFLOAT16, _interleaved(rounded, 2, kernels.lanes), None, 0, "bfloat16")


def _pack_float16(weight: torch.Tensor, lanes: int, name: str) -> Panels:
    """float16 [panels, in, columns]."""
    panels = pad_to_groups(_to_float16(weight, "a weight"), 2 * lanes).transpose(1, 2)
    return Panels(Format.FLOAT16, panels.contiguous(), None, 0, name)


def _pack_int8(weight: IntLinear, kernels: Kernels, order: torch.Tensor | None) -> Panels:
    """[panels, in / 2, columns, 2] of int8; or uint8 [panels, in / group, bytes]: these and scales.

    With byte products, words of codes as they are in place of the pairs.
    """
    codes, groups, lanes = weight.codes, weight.scales.shape[1], kernels.lanes
    if not _same_order(weight.order, order):
        if weight.order is not None:
            codes = torch.empty_like(codes).index_copy_(1, weight.order.long(), codes)
        codes = codes if order is None else codes[:, order.long()]
    if kernels.byte_dots:
        packed = _words(codes, lanes)
    else:
        packed = _interleaved((codes.to(torch.int16) - weight.scheme.middle).to(torch.int8), 2, lanes)
    if groups == 1:
        scales = pad_to_groups(weight.scales.float().squeeze(1), 2 * lanes).flatten()
        return Panels(Format.INT8, packed, scales, 0, weight.scheme.name)
    # Scales of small weights would be subnormal in float16.
    scales = _to_float16(weight.scales * _INT8_SCALE, "a scale")
    of_columns = pad_to_groups(scales, 2 * lanes).transpose(1, 2).contiguous()
    parts = [part.view(torch.uint8).reshape(len(packed), groups, -1) for part in (packed, of_columns)]
    panels = torch.cat(parts, dim=-1)
    return Panels(Format.INT8, panels, None, weight.shape[1] // groups, weight.scheme.name)


def _pack_fp8(weight: Fp8Linear, lanes: int) -> Panels:
    """uint8 [panels, in / 2, columns, 2], the second of two inputs first."""
    codes = weight.codes.view(torch.uint8)
    if bool(((codes & 0x7F) == _E4M3_NAN).any()):
        raise RunnerUnavailable("a weight is not a number")
    scales = (weight.scales * _FP8_SCALE).squeeze(1).expand(weight.shape[0])
    pairs = _interleaved(codes, 2, lanes).flip(-1)
    return Panels(Format.FP8, pairs, pad_to_groups(scales, 2 * lanes).flatten(), 0, weight.scheme.name)


def _pack_int4(weight: IntLinear, lanes: int) -> Panels:
    """uint8 [panels, in / group, bytes]: nibbles, scales and minima."""
    grid, group = weight.grid, weight.shape[1] // weight.scales.shape[1]
    numbers = torch.stack((_to_float16(grid.scales, "a scale"), _to_float16(grid.offsets, "a minimum")))
    panels = _pack_groups(weight.plain_codes(), numbers, lanes)
    return Panels(Format.INT4, panels, None, group, weight.scheme.name)


def _pack_nf4(weight: Nf4Linear, lanes: int) -> Panels:
    """uint8 [panels, in / block, bytes]: nibbles and scales."""
    scales = _to_float16(weight.scales.unpack().view(1, weight.shape[0], -1), "a scale")
    panels = _pack_groups(unpack_nibbles(weight.codes), scales, lanes)
    return Panels(Format.NF4, panels, None, weight.scheme.block_size, weight.scheme.name)


def _interleaved(codes: torch.Tensor, size: int, lanes: int) -> torch.Tensor:
    """[out, in] to [panels, in / size, columns, size]."""
    columns = pad_to_groups(codes, 2 * lanes)
    return columns.view(*columns.shape[:2], -1, size).transpose(1, 2).contiguous()


def _pack_groups(codes: torch.Tensor, numbers: torch.Tensor, lanes: int) -> torch.Tensor:
    """Codes of four bits, uint8 [out, in], and some float16 [some, out, groups] to uint8 [panels, groups, bytes].

    Two codes are a byte: those of one word of GROUP inputs in the low halves of a vector, those of the word four words
    later in the high halves.
    """
    words, groups = _words(codes, lanes), numbers.shape[2]
    first, second = words.chunk(2, dim=3)
    both = (first | second << 4).reshape(len(words), groups, -1)
    of_columns = pad_to_groups(numbers.transpose(0, 1), 2 * lanes).permute(0, 3, 2, 1).contiguous()
    return torch.cat([both, of_columns.view(len(words), groups, -1).view(torch.uint8)], dim=-1)


def _words(codes: torch.Tensor, lanes: int) -> torch.Tensor:
    """[out, in] to [panels, in / GROUP, half of a panel, word, column, input of a word]."""
    columns = pad_to_groups(codes, 2 * lanes)
    words = columns.view(len(columns), 2, lanes, columns.shape[2] // GROUP, GROUP // 4, 4)
    return words.permute(0, 3, 1, 4, 2, 5)
