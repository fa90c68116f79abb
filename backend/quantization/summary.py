"""What a model's weights are kept in, what that takes, and what it lost."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import torch

from backend.quantization.linears import linears
from backend.quantization.quantized_linear import QuantizedLinear
from backend.weights import ModelWeights

_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all matrices of the layers and the head, but not the embedding."""

    schemes: dict[str, int]
    """How many matrices are in each scheme; by name, the most frequent first."""
    bits_per_weight: float
    weight_bytes: int
    half_bytes: int
    """What the same matrices take in 16 bits."""
    relative_error: float | None
    """Root of the mean squared error over that of the weights themselves; None: it is not known what they were."""


@dataclass(slots=True)
class RoundingError:
    """What rounding has lost, added up over matrices."""

    _lost: float = 0.0
    _whole: float = 0.0

    def note(self, weight: torch.Tensor, packed: QuantizedLinear) -> None:
        """Compares a weight [out, in] with what is left of it."""
        whole = weight.float()
        self._lost += float((packed.unpack() - whole).square().sum(dtype=torch.float64))
        self._whole += float(whole.square().sum(dtype=torch.float64))

    @property
    def relative(self) -> float | None:
        """See `Summary.relative_error`; None: nothing has been rounded."""
        return math.sqrt(self._lost / self._whole) if self._whole else None


def summarise(weights: ModelWeights, relative_error: float | None = None) -> Summary | None:
    """What the weights are kept in; None where none of them is quantised."""
    matrices = [*linears(weights).values(), weights.head]
    packed = [matrix for matrix in matrices if not isinstance(matrix, torch.Tensor)]
    if not packed:
        return None
    count = sum(math.prod(matrix.shape) for matrix in matrices)
    # Floats are served in two bytes, whatever the file has.
    total = sum(
        _HALF_BYTES * math.prod(matrix.shape) if isinstance(matrix, torch.Tensor) else matrix.nbytes
        for matrix in matrices
    )
    names = Counter("float" if isinstance(matrix, torch.Tensor) else matrix.scheme.name for matrix in matrices)
    return Summary(
        schemes=dict(names.most_common()),
        bits_per_weight=8 * total / count,
        weight_bytes=total,
        half_bytes=_HALF_BYTES * count,
        relative_error=relative_error,
    )
