"""Layout of quantised weights for the kernels: 32-bit words, each with codes of inputs that are far apart.

A row of words is one output. Its inputs come in tiles, and a tile of the codes is a few *planes* of ``SPAN`` inputs:

    inputs of a tile      0 … 31 │ 32 … 63 │ 64 … 95 │ …        plane 0 │ plane 1 │ plane 2 │ …
    word j of the tile    code j │  32 + j │  64 + j │ …        from the lowest bits up

So after one mask, the lanes hold one plane of neighbouring inputs, and no data moves between lanes. A word has 8 codes
of four bits or 4 of eight; rows are padded to whole tiles, of 256 or 128 inputs. Groups begin at planes, so a plane of
an output has one scale. For groups of 16 inputs, planes have 16 inputs and tiles half as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch.nn import functional

from backend.quantized_weights.fp8_scheme import Fp8Linear
from backend.quantized_weights.int_scheme import IntLinear, unpack_nibbles
from backend.quantized_weights.nf4_scheme import LEVELS, Nf4Linear
from backend.quantized_weights.quantized_linear import CannotQuantize, QuantizedLinear

Form = Literal["int4", "int8", "nf4", "fp8"]
Offset = Literal["none", "zeros", "minima"]

_PLANES: dict[Form, int] = {"int4": 8, "int8": 4, "nf4": 8, "fp8": 4}
_SPANS = (32, 16)
_HALF_ERROR = 2.0**-11
"""Relative rounding error of normal half floats."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWeight:
    """A weight [out, in] on a device: ``scale * value of the code + offset``. Immutable.

    The value of an integer code is its distance from the middle, 8 or 128.

    Args:
        words: int32 [out, tiles * span], see the module.
        scales: float16 or float32 [groups, out], with groups for the padded inputs; those of neighbouring outputs are
            contiguous.
        offsets: as ``scales``. ``zeros``: the middle minus the code of zero, in steps of the scale. ``minima``: the
            values of code 0.
        levels: float16 [16], the values of NF4's codes; None for other forms.
        inputs: columns of the weight.
        group: inputs that share a scale; all padded inputs if an output has one scale.
        order: int64 [in]: column ``i`` is for input ``order[i]``; None: for ``i``.
        rounds_rows: whether activations are rounded to int8 first.
    """

    form: Form
    words: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    offset: Offset
    levels: torch.Tensor | None
    inputs: int
    group: int
    span: int
    order: torch.Tensor | None
    rounds_rows: bool

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.words.shape[0]

    @property
    def planes(self) -> int:
        """Codes in a word."""
        return _PLANES[self.form]

    @property
    def tiles(self) -> int:
        """Tiles of a row."""
        return self.words.shape[1] // self.span

    @property
    def run(self) -> int:
        """Consecutive planes that share a scale in every tile: a divisor of ``planes``."""
        if self.group % (self.planes * self.span) == 0:
            return self.planes
        run = self.group // self.span
        return run if self.planes % run == 0 else 1

    @property
    def nbytes(self) -> int:
        """Bytes on the device; the table of levels is shared."""
        parts = (self.words, self.scales, self.offsets, self.order)
        return sum(part.nbytes for part in parts if part is not None)

    def rows(self, first: int, last: int) -> DeviceWeight:
        """Some of the outputs, without a copy."""
        offsets = None if self.offsets is None else self.offsets[:, first:last]
        return replace(self, words=self.words[first:last], scales=self.scales[:, first:last], offsets=offsets)


def on_device(linear: QuantizedLinear, device: torch.device) -> DeviceWeight:
    """Converts a quantised weight for the kernels.

    Raises:
        CannotQuantize: no kernel supports the scheme; names it.
    """
    if isinstance(linear, IntLinear):
        return _of_integers(linear, device)
    if isinstance(linear, Nf4Linear):
        outputs, inputs = linear.shape
        blocks = linear.scales.unpack().to(device).view(outputs, -1)
        codes = unpack_nibbles(linear.codes.to(device))
        levels = torch.tensor(LEVELS, dtype=torch.float16, device=device)
        weight = _packed("nf4", codes, _as_half(blocks), inputs // blocks.shape[1], linear.scheme.name)
        return replace(weight, levels=levels)
    if isinstance(linear, Fp8Linear):
        codes = linear.codes.view(torch.uint8).to(device)
        scales = linear.scales.to(device).expand(linear.shape[0], 1)
        return _packed("fp8", codes, scales, None, linear.scheme.name)
    raise CannotQuantize(f"the CUDA kernels do not compute with {linear.scheme.name} weights")


def _of_integers(linear: IntLinear, device: torch.device) -> DeviceWeight:
    scheme, codes = linear.scheme, linear.codes.to(device)
    weight = _packed(
        "int4" if scheme.bits == 4 else "int8",
        unpack_nibbles(codes) if scheme.bits == 4 else codes,
        linear.scales.to(device),
        scheme.group_size,
        scheme.name,
    )
    offset: Offset = "none"
    offsets = None
    if linear.zeros is not None:
        offset, offsets = "zeros", (scheme.middle - linear.zeros.to(device).float()).to(linear.scales.dtype)
    elif linear.minima is not None:
        offset, offsets = "minima", linear.minima.to(device)
    return replace(
        weight,
        offset=offset,
        offsets=None if offsets is None else _padded(offsets, len(weight.scales)),
        order=None if linear.order is None else linear.order.to(device, torch.int64),
        rounds_rows=scheme.activation_bits == 8,
    )


def _packed(form: Form, codes: torch.Tensor, scales: torch.Tensor, group: int | None, name: str) -> DeviceWeight:
    """From unpacked codes uint8 [out, in] and scales [out, groups]; a group of None: all inputs."""
    outputs, inputs = codes.shape
    span = next((span for span in _SPANS if group is None or group % span == 0), None)
    if span is None:
        raise CannotQuantize(
            f"the CUDA kernels do not compute with {name} weights: groups of {group} inputs, expected multiples of 16"
        )
    planes = _PLANES[form]
    tiles = -(-inputs // (planes * span))
    width = tiles * planes * span
    cut = functional.pad(codes, (0, width - inputs)).view(outputs, tiles, planes, span)
    # Bytes of a word, lowest first: CPU and GPU are little-endian.
    each = cut if planes == 4 else cut[:, :, 0::2] | cut[:, :, 1::2] << 4
    words = each.transpose(2, 3).contiguous().view(torch.int32).view(outputs, -1)
    group = width if group is None else group
    scales = _padded(scales, -(-width // group))
    return DeviceWeight(form, words, scales, None, "none", None, inputs, group, span, None, rounds_rows=False)


def _padded(scales: torch.Tensor, groups: int) -> torch.Tensor:
    """[out, some groups] to [groups, out]."""
    return functional.pad(scales, (0, groups - scales.shape[1])).T.contiguous()


def _as_half(scales: torch.Tensor) -> torch.Tensor:
    """In half floats, unless these lose too much of very small or large scales."""
    half = scales.to(torch.float16)
    lost = (half.float() - scales).abs().max()
    return half if bool(lost <= scales.abs().max() * _HALF_ERROR) else scales


def concatenate(weights: Sequence[DeviceWeight]) -> DeviceWeight | None:
    """One weight with the outputs of all; None if their inputs or forms differ."""
    first = weights[0]
    if not all(_can_concatenate(first, other) for other in weights[1:]):
        return None
    scales = [weight.scales for weight in weights]
    offsets = [weight.offsets for weight in weights if weight.offsets is not None]
    return replace(
        first,
        words=torch.cat([weight.words for weight in weights]),
        scales=torch.cat(scales, dim=1),  # in float32 if some are
        offsets=torch.cat(offsets, dim=1) if offsets else None,
    )


def _can_concatenate(one: DeviceWeight, other: DeviceWeight) -> bool:
    same_order = one.order is other.order or (
        one.order is not None and other.order is not None and torch.equal(one.order, other.order)
    )
    return same_order and all(
        getattr(one, name) == getattr(other, name)
        for name in ("form", "offset", "inputs", "group", "span", "rounds_rows")
    )
