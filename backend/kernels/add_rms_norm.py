"""Residual addition and RMS norm (arXiv 1910.07467) in one pass over a row."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(
    residual: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    inside = columns < width
    at = row * width + columns
    kind = residual.dtype.element_ty
    x = tl.load(residual + at, mask=inside, other=0.0)
    if ADDS:
        # Rounded first, so that the norm is of the residual that the next layer adds to.
        x = (x.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(residual + at, x, mask=inside)
    wide = x.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = wide * factor * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + at, scaled.to(kind), mask=inside)


def add_rms_norm(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds ``delta`` to ``residual`` in place and returns the norm of the sum; both [T, hidden], contiguous.

    The sum is rounded to the dtype of ``residual``, the norm is computed in float32.
    """
    rows, width = residual.shape
    output = torch.empty_like(residual)
    columns = int(triton.next_power_of_2(width))
    _add_rms_norm[(rows,)](
        residual,
        residual if delta is None else delta,
        weight,
        output,
        width,
        eps,
        COLUMNS=columns,
        ADDS=delta is not None,
        num_warps=min(16, max(1, columns // 512)),
    )
    return output
