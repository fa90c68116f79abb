"""What the linear layers of a model take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backend.quantization.float_scheme import FloatScheme
from backend.quantization.int_scheme import IntScheme
from backend.quantization.linears import linears
from backend.quantization.quantized_linear import Scheme
from backend.weights import ModelWeights

# What runners make of floats, by how they call it.
_MADE: dict[str, Scheme] = {
    "bfloat16": FloatScheme("bfloat16"),
    "float16": FloatScheme("float16"),
    "int8": IntScheme(8),
    "int4": IntScheme(4, 32, "minimum"),
}


@dataclass(frozen=True, slots=True)
class WeightSize:
    """Of all matrices in the decoder layers: neither embedding nor head, norms nor biases."""

    weights: int
    nbytes: int
    """Scales included."""

    @property
    def bits_per_weight(self) -> float:
        """On average."""
        return 8 * self.nbytes / self.weights

    @property
    def share_of_half(self) -> float:
        """In units of what 16 bits a weight would take."""
        return self.nbytes / (2 * self.weights)


def size_of(weights: ModelWeights, precision: str) -> WeightSize:
    """Sizes of a model as a runner keeps it.

    Args:
        precision: `ModelRunner.weights_precision`, for the weights that are not quantised in ``weights``.
    """
    count, total = 0, 0.0
    for weight in linears(weights).values():
        rows, columns = weight.shape
        count += rows * columns
        if isinstance(weight, torch.Tensor):
            bits = _MADE[precision].bits_per_weight(rows, columns) if precision in _MADE else 32
            total += bits * rows * columns / 8
        else:
            total += weight.nbytes
    return WeightSize(count, round(total))
