"""Products with quantised weights: which kernel, by the number of rows and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from backend.kernels.quantized_few_rows import MOST_ROWS, quantized_few_rows
from backend.kernels.quantized_fp8 import scaled_product
from backend.kernels.quantized_tiles import quantized_tiles
from backend.kernels.quantized_weight import DeviceWeight
from backend.kernels.quantized_widen import quantized_widen
from backend.quantized_weights.quantized_linear import row_scales

SCALED_ROWS = 64
"""From so many on, rows are rounded to eight bits where the device multiplies such floats."""
WIDENED_ROWS = 512
"""From so many on, weights are widened once and multiplied by cuBLAS. More than the largest recorded batch has, so that
decoding never makes a dense copy."""
_WIDENED_BYTES = 128 * 2**20
"""Of widened weights at a time; more outputs are computed in parts."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedProduct:
    """``y = x · weightᵀ + bias`` for weights as they are kept.

    Args:
        bias: [out] or None.
        scaled: whether the device multiplies eight-bit floats.
    """

    weight: DeviceWeight
    bias: torch.Tensor | None
    scaled: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[R, in], elements of a row next to each other, to [R, out]; no dense copy below `WIDENED_ROWS`."""
        weight, bias = self.weight, self.bias
        if weight.rounds_rows:
            scales = row_scales(x)
            x = (torch.round(x.float() / scales) * scales).to(x.dtype)
        if weight.order is not None:
            x = x.index_select(1, weight.order)
        rows = x.shape[0]
        if rows <= MOST_ROWS:
            return quantized_few_rows(x, weight, bias)
        if self.scaled and rows >= SCALED_ROWS and fits_scaled(x, weight):
            return scaled_product(x, weight, bias)
        if rows < WIDENED_ROWS:
            return quantized_tiles(x, weight, bias)
        return _widened(x, weight, bias)


def fits_scaled(x: torch.Tensor, weight: DeviceWeight) -> bool:
    """Whether `scaled_product` computes this where the device can."""
    return weight.form == "fp8" and x.dtype == torch.bfloat16 and weight.outputs % 16 == 0


def _widened(x: torch.Tensor, weight: DeviceWeight, bias: torch.Tensor | None) -> torch.Tensor:
    most = max(1, _WIDENED_BYTES // (weight.inputs * x.dtype.itemsize))
    if weight.outputs <= most:
        return functional.linear(x, quantized_widen(weight, x.dtype), bias)
    each = -(-weight.outputs // -(-weight.outputs // most))
    each = -(-each // 16) * 16  # rows of scales begin at 32 bytes in every part
    output = torch.empty(x.shape[0], weight.outputs, dtype=x.dtype, device=x.device)
    for first in range(0, weight.outputs, each):
        last = min(first + each, weight.outputs)
        part = quantized_widen(weight.rows(first, last), x.dtype)
        output[:, first:last] = functional.linear(x, part, None if bias is None else bias[first:last])
    return output
