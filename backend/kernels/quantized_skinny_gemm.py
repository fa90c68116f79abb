"""Skinny GEMM with a quantised matrix and one to four rows, bound by the bandwidth with which the words are read.

As in `skinny_gemm`, every program computes some of the outputs and has one running sum for each word of a tile. Codes
are multiplied unscaled; a group's sum is scaled once.
"""

import torch
import triton
import triton.language as tl

from backend.kernels.quantized_codes import ONES, offsets_of, plane_values
from backend.kernels.quantized_weight import DeviceWeight

MAX_ROWS = 4


@triton.jit
def _quantized_skinny_gemm(
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    offsets: tl.tensor,
    levels: tl.tensor,
    ones: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    tiles: tl.tensor,
    scale_stride: tl.tensor,
    stride: tl.tensor,
    FORM: tl.constexpr,
    PLANES: tl.constexpr,
    SPAN: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TILES: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    lane = tl.arange(0, SPAN)
    known = own < outputs
    begin = own.to(tl.int64) * (tiles * SPAN)
    sums = tl.full([ROWS, OUTPUTS, TILES, SPAN], 0.0, tl.float32)
    for start in tl.range(0, tiles, TILES, num_stages=4):
        tile = start + tl.arange(0, TILES)
        there = tile < tiles
        w = tl.load(
            words + begin[:, None, None] + tile[None, :, None] * SPAN + lane[None, None, :],
            mask=known[:, None, None] & there[None, :, None],
            other=0,
            eviction_policy="evict_first",
        )
        for first in tl.static_range(0, PLANES, RUN):
            group = (tile * (PLANES * SPAN) + first * SPAN) // GROUP
            kept = own[:, None] + group[None, :] * scale_stride
            scaled = known[:, None] & there[None, :]
            scale = tl.load(scales + kept, mask=scaled, other=0.0).to(tl.float32)
            products = tl.full([ROWS, OUTPUTS, TILES, SPAN], 0.0, tl.float32)
            total = tl.full([ROWS, TILES, SPAN], 0.0, tl.float32)
            for plane in tl.static_range(first, first + RUN):
                column = tile[:, None] * (PLANES * SPAN) + plane * SPAN + lane[None, :]
                v = tl.load(
                    x + row[:, None, None] * stride + column[None, :, :],
                    mask=(row < rows)[:, None, None] & (column < inputs)[None, :, :],
                    other=0.0,
                ).to(tl.float32)
                products += v[:, None, :, :] * plane_values(w[None, :, :, :], levels, ones, plane, FORM)
                if OFFSET != "none":
                    total += v
            sums += products * scale[None, :, :, None]
            if OFFSET != "none":
                offset = tl.load(offsets + kept, mask=scaled, other=0.0).to(tl.float32)
                sums += (
                    total[:, None, :, :] * offsets_of(offset, scale, 1 << (32 // PLANES - 1), OFFSET)[None, :, :, None]
                )
    result = tl.sum(tl.sum(sums, 3), 2)
    if BIAS:
        result += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None] * outputs + own[None, :],
        result.to(output.dtype.element_ty),
        mask=(row < rows)[:, None] & known[None, :],
    )


def quantized_skinny_gemm(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32.

    Args:
        x: [R, in], R from 1 to ``MAX_ROWS``, columns in the weight's order, each row contiguous.
        bias: [out] or None.

    Returns:
        [R, out] in x's dtype.
    """
    rows = x.shape[0]
    own = 16 if rows <= 2 else 8  # as many sums as registers hold
    output = torch.empty(rows, weight.outputs, dtype=x.dtype, device=x.device)
    _quantized_skinny_gemm[(triton.cdiv(weight.outputs, own),)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        weight.scales if weight.levels is None else weight.levels,
        ONES,
        x if bias is None else bias,
        output,
        rows,
        weight.outputs,
        weight.inputs,
        weight.tiles,
        weight.scales.stride(0),
        x.stride(0),
        FORM=weight.form,
        PLANES=weight.planes,
        SPAN=weight.span,
        GROUP=weight.group,
        RUN=weight.run,
        OFFSET=weight.offset,
        ROWS=triton.next_power_of_2(rows),
        OUTPUTS=own,
        # The quickest on an H200.
        TILES=8 if weight.form == "nf4" else 4,
        BIAS=bias is not None,
        num_warps=2 if weight.form == "int8" else 4,
    )
    return output
