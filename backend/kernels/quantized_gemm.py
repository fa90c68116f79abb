"""A quantised matrix times many rows: codes are dequantised in registers and multiplied by the matrix units.

Outputs are the rows of the units' products and activations the columns, so that few rows of activations waste little.
Few rows also give few programs; then the inputs are split into parts (split-K), summed in a fixed order.
"""

import torch
import triton
import triton.language as tl

from backend.kernels.quantized_codes import ONES, offsets_of, plane_values
from backend.kernels.quantized_weight import DeviceWeight, Form

_MIN_ROWS, _MAX_ROWS = 16, 64
"""Of a product of the matrix units."""
_COLUMNS = 1024


@triton.jit
def _quantized_gemm(
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
    part_tiles: tl.tensor,
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
    BIAS: tl.constexpr,
    OPERANDS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(2)
    lane = tl.arange(0, SPAN)
    known = own < outputs
    begin = own.to(tl.int64) * (tiles * SPAN)
    of_rows = row.to(tl.int64) * stride
    sums = tl.full([OUTPUTS, ROWS], 0.0, tl.float32)
    first_tile = part * part_tiles
    for tile in tl.range(first_tile, tl.minimum(first_tile + part_tiles, tiles), num_stages=STAGES):
        w = tl.load(
            words + begin[:, None] + tile * SPAN + lane[None, :],
            mask=known[:, None],
            other=0,
            eviction_policy="evict_first",
        )
        for first in tl.static_range(0, PLANES, RUN):
            kept = own + (tile * (PLANES * SPAN) + first * SPAN) // GROUP * scale_stride
            scale = tl.load(scales + kept, mask=known, other=0.0).to(tl.float32)
            for plane in tl.static_range(first, first + RUN):
                column = tile * (PLANES * SPAN) + plane * SPAN + lane
                v = tl.load(
                    x + of_rows[None, :] + column[:, None],
                    mask=(row < rows)[None, :] & (column < inputs)[:, None],
                    other=0.0,
                )
                values = plane_values(w, levels, ones, plane, FORM) * scale[:, None]
                if OFFSET != "none":
                    offset = tl.load(offsets + kept, mask=known, other=0.0).to(tl.float32)
                    values += offsets_of(offset, scale, 1 << (32 // PLANES - 1), OFFSET)[:, None]
                sums = tl.dot(values.to(OPERANDS), v.to(OPERANDS), sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + own, mask=known, other=0.0).to(tl.float32)[:, None]
    at = (part * rows + row).to(tl.int64) * outputs
    tl.store(
        output + at[None, :] + own[:, None],
        sums.to(output.dtype.element_ty),
        mask=(row < rows)[None, :] & known[:, None],
    )


@triton.jit
def _sum_parts(
    partial: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    outputs: tl.tensor,
    elements: tl.tensor,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < elements
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + part * elements + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + at, total.to(output.dtype.element_ty), mask=inside)


def quantized_gemm(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``: scaled weights are rounded to x's dtype, products are summed in float32.

    Args:
        x: [R, in], columns in the weight's order, each row contiguous.
        bias: [out] or None.

    Returns:
        [R, out] in x's dtype.
    """
    rows, outputs = x.shape[0], weight.outputs
    tile_rows = min(_MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(rows)))
    own, warps, stages, programs = _tiling(weight.form, x.dtype, tile_rows)
    grid = triton.cdiv(outputs, own), triton.cdiv(rows, tile_rows)
    part_tiles, parts = _parts(weight.tiles, grid[0] * grid[1], programs)
    output = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    partial = torch.empty(parts, rows, outputs, device=x.device) if parts > 1 else output
    _quantized_gemm[(*grid, parts)](
        x,
        weight.words,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        weight.scales if weight.levels is None else weight.levels,
        ONES,
        x if bias is None else bias,
        partial,
        rows,
        outputs,
        weight.inputs,
        weight.tiles,
        part_tiles,
        weight.scales.stride(0),
        x.stride(0),
        FORM=weight.form,
        PLANES=weight.planes,
        SPAN=weight.span,
        GROUP=weight.group,
        RUN=weight.run,
        OFFSET=weight.offset,
        ROWS=tile_rows,
        OUTPUTS=own,
        BIAS=bias is not None and parts == 1,
        OPERANDS=_operands(x.dtype),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=stages,
        num_warps=warps,
    )
    if parts > 1:
        _sum_parts[(triton.cdiv(rows * outputs, _COLUMNS),)](
            partial,
            x if bias is None else bias,
            output,
            outputs,
            rows * outputs,
            PARTS=parts,
            COLUMNS=_COLUMNS,
            BIAS=bias is not None,
            num_warps=4,
        )
    return output


def _tiling(form: Form, dtype: torch.dtype, tile_rows: int) -> tuple[int, int, int, int]:
    """Outputs of a program, its warps, the stages of its loads, and how many programs a launch should have at least.

    The quickest of those that were tried on an H200, where two programs fit the shared memory of a multiprocessor. They
    are the same on every device, and so are the sums.
    """
    if dtype == torch.float32:  # outside the matrix units, from registers
        return 32, 4, 2 if tile_rows == _MAX_ROWS else 4, 256
    few_bits = form in ("int4", "nf4")
    if tile_rows == _MAX_ROWS:
        return 128, 8 if form == "int4" else 4, 2 if few_bits else 3, 256
    if tile_rows == _MIN_ROWS:
        return 128 if form == "nf4" else 64, 4, 2 if form == "nf4" else 3, 528
    return 64, 4, 2 if few_bits else 3, 528


def _parts(tiles: int, programs: int, least: int) -> tuple[int, int]:
    """Tiles of a part and the number of parts, none of them empty: from the sizes alone."""
    wanted = min(tiles, max(1, least // programs))
    each = -(-tiles // wanted)
    return each, -(-tiles // each)


def _operands(dtype: torch.dtype) -> tl.dtype:
    """Dtype of the operands; the interpreter has no products of bfloat16."""
    of_device = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
    compiled = isinstance(_quantized_gemm, triton.JITFunction)
    return of_device[dtype] if compiled or dtype != torch.bfloat16 else tl.float32
