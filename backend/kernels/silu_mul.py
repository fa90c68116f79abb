"""Activation of a gated MLP: SiLU(gate) * up (SwiGLU, arXiv 2002.05202)."""

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


@triton.jit
def _silu_mul(gate_up: tl.tensor, output: tl.tensor, width: tl.tensor, COLUMNS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    at = gate_up + row * (2 * width) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * width + columns, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * width], gate first, contiguous, to [T, width]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _silu_mul[(rows, triton.cdiv(width, _COLUMNS))](gate_up, output, width, COLUMNS=_COLUMNS, num_warps=4)
    return output
