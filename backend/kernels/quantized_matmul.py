"""Products with quantised weights. The number of rows and the FP8 support select the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from backend.kernels.dequantize import dequantize
from backend.kernels.fp8_gemm import fp8_gemm
from backend.kernels.quantized_gemm import quantized_gemm
from backend.kernels.quantized_skinny_gemm import MAX_ROWS, quantized_skinny_gemm
from backend.kernels.quantized_weight import DeviceWeight
from backend.quantized_weights.quantized_linear import row_scales

FP8_MIN_ROWS = 64
"""From this many rows on, activations are rounded to FP8 if the device supports it."""
DEQUANTIZE_MIN_ROWS = 129
"""From this many rows on, weights are dequantised once and multiplied by cuBLAS: what is quicker on an H200."""
_DEQUANTIZED_BYTES = 128 * 2**20
"""Bytes of dequantised weights at a time; more outputs are computed in parts."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedMatmul:
    """``y = x · weightᵀ + bias`` for quantised weights.

    Args:
        bias: [out] or None.
        scaled: whether the device multiplies FP8.
    """

    weight: DeviceWeight
    bias: torch.Tensor | None
    scaled: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in], each row contiguous, to [R, out]; no dense copy below `DEQUANTIZE_MIN_ROWS`."""
        weight, bias = self.weight, self.bias
        if weight.rounds_rows:
            scales = row_scales(x)
            x = (torch.round(x.float() / scales) * scales).to(x.dtype)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        rows = x.shape[0]
        if rows <= MAX_ROWS:
            return quantized_skinny_gemm(x, weight, bias)
        if self.scaled and rows >= FP8_MIN_ROWS and fits_fp8_gemm(x, weight):
            return fp8_gemm(x, weight, bias)
        if rows < DEQUANTIZE_MIN_ROWS:
            return quantized_gemm(x, weight, bias)
        return _dequantized_matmul(x, weight, bias)


def fits_fp8_gemm(x: torch.Tensor, weight: DeviceWeight) -> bool:
    """Whether `fp8_gemm` supports this product, if the device does."""
    return weight.form == "fp8" and x.dtype == torch.bfloat16 and weight.outputs % 16 == 0


def _dequantized_matmul(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None) -> torch.Tensor:
    most = max(1, _DEQUANTIZED_BYTES // (weight.inputs * x.dtype.itemsize))
    if weight.outputs <= most:
        return functional.linear(x, dequantize(weight, x.dtype), bias)
    each = -(-weight.outputs // -(-weight.outputs // most))
    each = -(-each // 16) * 16  # aligns rows of scales to 32 bytes in each part
    output = torch.empty(x.shape[0], weight.outputs, dtype=x.dtype, device=x.device)
    for first in range(0, weight.outputs, each):
        last = min(first + each, weight.outputs)
        part = dequantize(weight.rows(first, last), x.dtype)
        output[:, first:last] = functional.linear(x, part, None if bias is None else bias[first:last])
    return output
