"""Linear layers of the torch runner: those with one input as one, quantised or not."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from backend.model_loader.weights import Linear
from backend.quantized_weights.float_scheme import FloatLinear, FloatScheme
from backend.quantized_weights.quantized_linear import QuantizedLinear
from backend.runners.torch.quantized_matmul import KernelTable, QuantizedMatmul


class TorchLinear:
    """``y = x · weightᵀ + bias`` of layers that have one input, their outputs side by side.

    Args:
        parts: in the order of their outputs. Dense ones become one matrix; a single one in the right dtype stays where
            it is, mapped from its file.
        dtype: of dense weights, biases and activations.
        table: of how quantised ones are multiplied.
    """

    def __init__(self, parts: Sequence[Linear], dtype: torch.dtype, table: KernelTable) -> None:
        self._dense: torch.Tensor | None = None
        self._products: list[QuantizedMatmul] = []
        dense = [part.weight for part in parts if isinstance(part.weight, torch.Tensor)]
        if len(dense) < len(parts):
            self._products = [QuantizedMatmul(_quantized(part, dtype), table) for part in parts]
        elif len(dense) == 1:
            self._dense = dense[0].to(dtype)
        else:
            self._dense = torch.empty(sum(map(len, dense)), dense[0].shape[1], dtype=dtype)
            rows = torch.split(self._dense, [len(part) for part in dense])
            for place, part in zip(rows, dense, strict=True):
                place.copy_(part)  # straight from the file: no part is ever in memory twice
        biases = [part.bias.to(dtype) for part in parts if part.bias is not None]
        self._bias = torch.cat(biases) if biases else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] to [T, out]."""
        if self._dense is not None:
            return functional.linear(x, self._dense, self._bias)
        y = torch.cat([product(x) for product in self._products], dim=1)
        return y if self._bias is None else y + self._bias


def _quantized(part: Linear, dtype: torch.dtype) -> QuantizedLinear:
    """A part of a layer of which others are quantised."""
    if not isinstance(part.weight, torch.Tensor):
        return part.weight
    return FloatLinear(FloatScheme(), part.weight.to(dtype))
