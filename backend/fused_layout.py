"""Weight matrices in the layouts of ``fused_step.cpp``: panels of output columns, whose kernels read one stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch

from backend.fused_build import FusedUnavailable
from backend.weights import LayerWeights, Linear, ModelWeights, dense

Precision = Literal["float16", "int8", "int4"]
KVPrecision = Literal["float16", "int8"]

GROUP = 32
"""Inputs that share a scale and a minimum where weights have four bits."""

# What is left of a weight does not depend on the width of the vectors.
_ANY_LANES = 8
_HALF_MAX = torch.finfo(torch.float16).max


def pack_halves(weight: torch.Tensor, lanes: int) -> tuple[torch.Tensor, None]:
    """[out, in] to float16 [panels, in, 2 * lanes].

    Raises:
        FusedUnavailable: a weight is beyond the range of half floats.
    """
    low, high = torch.aminmax(weight)
    if not -_HALF_MAX <= float(low) <= float(high) <= _HALF_MAX:
        raise FusedUnavailable("a weight is beyond the range of half floats")
    return in_groups(weight.to(torch.float16), 2 * lanes).transpose(1, 2).contiguous(), None


def pack_bytes(weight: torch.Tensor, lanes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] to uint8 [panels, in / 4, 2 * lanes, 4], and the columns' scales, float32 [panels * 2 * lanes].

    A column's weights are ``scale * (byte - 128)``, which is within half a scale of what they were.
    """
    columns = in_groups(weight.float(), 2 * lanes)
    scales = columns.abs().amax(dim=-1, keepdim=True) / 127
    whole = torch.round(columns / torch.where(scales > 0, scales, 1.0)) + 128
    panels, width, inputs = columns.shape
    words = whole.to(torch.uint8).view(panels, width, inputs // 4, 4).transpose(1, 2)
    return words.contiguous(), scales.flatten().contiguous()


def pack_nibbles(weight: torch.Tensor, lanes: int) -> tuple[torch.Tensor, None]:
    """[out, in] to uint8 [panels, in / GROUP, bytes]: nibbles, then float16 scales and minima of the panel's columns.

    A weight is ``scale * nibble + minimum`` of its column's group (Q4_1 of llama.cpp), within half a scale, give or
    take the rounding of scale and minimum, of what it was.
    """
    columns = in_groups(weight.float(), 2 * lanes)
    panels, width, inputs = columns.shape
    groups = columns.view(panels, width, inputs // GROUP, GROUP)
    low, high = torch.aminmax(groups, dim=-1)
    minima = low.to(torch.float16)
    scales = ((high - minima.float()) / 15).to(torch.float16)
    # As the kernel will see them: the nibbles make up for their rounding.
    steps = torch.where(scales > 0, scales, 1.0).float().unsqueeze(-1)
    nibbles = torch.round((groups - minima.float().unsqueeze(-1)) / steps).clamp(0, 15).to(torch.uint8)
    words = nibbles.view(panels, 2, lanes, inputs // GROUP, GROUP // 4, 4).permute(0, 3, 1, 4, 2, 5)
    first, second = words.chunk(2, dim=3)
    both = (first | second << 4).reshape(panels, inputs // GROUP, -1)
    of_columns = torch.stack((scales, minima), dim=1).permute(0, 3, 1, 2).contiguous()  # [panel, group, 2, column]
    return torch.cat((both, of_columns.view(panels, inputs // GROUP, -1).view(torch.uint8)), dim=-1).contiguous(), None


def unpack_bytes(panels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack_bytes``: float32 [columns, in], padding included."""
    columns = panels.transpose(1, 2).flatten(0, 1).flatten(1)
    return (columns.float() - 128) * scales.unsqueeze(1)


def unpack_nibbles(packed: torch.Tensor, lanes: int) -> torch.Tensor:
    """The inverse of ``pack_nibbles``: float32 [columns, in], padding included."""
    columns, groups = 2 * lanes, packed.shape[1]
    size = GROUP // 2 * columns
    both = packed[..., :size].reshape(-1, groups, 2, GROUP // 8, lanes, 4)
    words = torch.cat((both & 15, both >> 4), dim=3).permute(0, 2, 4, 1, 3, 5)
    nibbles = words.reshape(-1, groups, GROUP).float()
    numbers = packed[..., size:].contiguous().view(torch.float16).view(-1, groups, 2, columns).permute(2, 0, 3, 1)
    scales, minima = numbers.reshape(2, -1, groups, 1).float()
    columns_of_floats: torch.Tensor = (nibbles * scales + minima).flatten(1)
    return columns_of_floats


def as_kept(weights: ModelWeights, precision: Precision) -> ModelWeights:
    """The weights with what the precision does to them, as floats: what the reference needs for a comparison."""
    if precision == "float16":
        return weights

    def bytes_of(weight: torch.Tensor) -> torch.Tensor:
        return unpack_bytes(*pack_bytes(weight, _ANY_LANES))[: weight.shape[0]]

    def nibbles_of(weight: torch.Tensor) -> torch.Tensor:
        return unpack_nibbles(pack_nibbles(weight, _ANY_LANES)[0], _ANY_LANES)[: weight.shape[0]]

    keep = bytes_of if precision == "int8" else nibbles_of

    def linear(part: Linear) -> Linear:
        return replace(part, weight=keep(part.dense))

    def layer(of: LayerWeights) -> LayerWeights:
        return replace(
            of,
            query=linear(of.query),
            key=linear(of.key),
            value=linear(of.value),
            output=linear(of.output),
            mlps=tuple(replace(m, gate=linear(m.gate), up=linear(m.up), down=linear(m.down)) for m in of.mlps),
        )

    return replace(weights, layers=tuple(layer(of) for of in weights.layers), head=bytes_of(dense(weights.head)))


def in_groups(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, ...] to [ceil(rows / size), size, ...], the last group padded with zeros."""
    missing = -tensor.shape[0] % size
    if missing:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor.view(-1, size, *tensor.shape[1:])
