"""Dequantises a matrix, or some of its outputs, for products with many rows, where this costs little."""

import torch
import triton
import triton.language as tl

from backend.kernels.quantized_codes import ONES, offsets_of, plane_values
from backend.kernels.quantized_weight import DeviceWeight

_OUTPUTS = 16


@triton.jit
def _dequantize(
    words: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    levels: tl.tensor,
    ones: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    tiles: tl.tensor,
    scale_stride: tl.tensor,
    FORM: tl.constexpr,
    PLANES: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    OFFSET: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tile = tl.program_id(1)
    lane = tl.arange(0, SPAN)
    known = own < outputs
    wide = own.to(tl.int64)
    w = tl.load(words + wide[:, None] * (tiles * SPAN) + tile * SPAN + lane[None, :], mask=known[:, None], other=0)
    for first in tl.static_range(0, PLANES, RUN):
        kept = own + (tile * (PLANES * SPAN) + first * SPAN) // GROUP * scale_stride
        scale = tl.load(scales + kept, mask=known, other=0.0).to(tl.float32)
        for plane in tl.static_range(first, first + RUN):
            column = tile * (PLANES * SPAN) + plane * SPAN + lane
            values = plane_values(w, levels, ones, plane, FORM) * scale[:, None]
            if OFFSET != "none":
                offset = tl.load(offsets + kept, mask=known, other=0.0).to(tl.float32)
                values += offsets_of(offset, scale, 1 << (32 // PLANES - 1), OFFSET)[:, None]
            tl.store(
                output + wide[:, None] * inputs + column[None, :],
                values.to(output.dtype.element_ty),
                mask=known[:, None] & (column < inputs)[None, :],
            )


def dequantize(weight: DeviceWeight, dtype: torch.dtype) -> torch.Tensor:
    """[out, in] in ``dtype``, columns in the weight's order."""
    output = torch.empty(weight.outputs, weight.inputs, dtype=dtype, device=weight.words.device)
    _dequantize[(triton.cdiv(weight.outputs, _OUTPUTS), weight.tiles)](
        weight.words,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        weight.scales if weight.levels is None else weight.levels,
        ONES,
        output,
        weight.outputs,
        weight.inputs,
        weight.tiles,
        weight.scales.stride(0),
        FORM=weight.form,
        PLANES=weight.planes,
        SPAN=weight.span,
        GROUP=weight.group,
        RUN=weight.run,
        OFFSET=weight.offset,
        OUTPUTS=_OUTPUTS,
        num_warps=4,
    )
    return output
