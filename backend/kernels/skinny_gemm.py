"""Skinny GEMM: a matrix times one to four rows, bound by the bandwidth with which the matrix is read.

Every program computes some outputs and has one running sum for each element of a tile. The sums are reduced only at
the end, so that no load waits for a reduction.
"""

import torch
import triton
import triton.language as tl

MAX_ROWS = 4
_OUTPUTS = 8
_COLUMNS = 256


@triton.jit
def _skinny_gemm(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    own = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    begin = own.to(tl.int64) * width
    sums = tl.full([ROWS, OUTPUTS, COLUMNS], 0.0, tl.float32)
    # Tiles are fetched while those before them are summed: a device reads at full speed only with tens of kilobytes
    # in flight per multiprocessor.
    for start in tl.range(0, width, COLUMNS, num_stages=4):
        at = start + column
        inside = at < width
        w = tl.load(
            weight + begin[:, None] + at[None, :],
            mask=(own < outputs)[:, None] & inside[None, :],
            other=0.0,
            eviction_policy="evict_first",
        ).to(tl.float32)
        v = tl.load(
            x + row[:, None] * stride + at[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        sums += v[:, None, :] * w[None, :, :]
    total = tl.sum(sums, 2)
    if BIAS:
        total += tl.load(bias + own, mask=own < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        output + row[:, None] * outputs + own[None, :],
        total.to(output.dtype.element_ty),
        mask=(row < rows)[:, None] & (own < outputs)[None, :],
    )


def skinny_gemm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias``, summed in float32.

    Args:
        x: [R, K], R from 1 to ``MAX_ROWS``, each row contiguous.
        weight: [N, K], contiguous, of x's dtype.
        bias: [N] or None.

    Returns:
        [R, N] in x's dtype.
    """
    rows, width = x.shape
    outputs = weight.shape[0]
    output = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    _skinny_gemm[(triton.cdiv(outputs, _OUTPUTS),)](
        x,
        weight,
        weight if bias is None else bias,
        output,
        rows,
        outputs,
        width,
        x.stride(0),
        ROWS=triton.next_power_of_2(rows),
        OUTPUTS=_OUTPUTS,
        COLUMNS=_COLUMNS,
        BIAS=bias is not None,
        num_warps=4,
    )
    return output
