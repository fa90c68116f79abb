"""What a model's weights are kept in, what that takes, and what it lost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from backend.model_loader.linears import linears
from backend.model_loader.weights import ModelWeights
from backend.quantization.methods.report import Divergence
from backend.quantized_weights.quantized_linear import QuantizedLinear

_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all matrices of the layers and the head, but not the embedding."""

    schemes: dict[str, int]
    """How many matrices are in each scheme; by name, the most frequent first."""
    held_as: dict[str, int]
    """Bytes by the form in which a runner has them, which may be a wider one than their scheme."""
    bits_per_weight: float
    weight_bytes: int
    half_bytes: int
    """What the same matrices take in 16 bits."""
    relative_error: float | None
    """Root of the mean squared error over that of the weights themselves; None: it is not known what they were."""
    divergence: Divergence | None = None
    """Of the model with these layers from the one that they were made of, as measured when they were made."""

    def held(self, forms: Mapping[str, int]) -> Summary:
        """The same in a runner that keeps so many bytes in each form."""
        total = sum(forms.values())
        bits = 8 * total * _HALF_BYTES / self.half_bytes
        return replace(self, held_as=dict(forms), bits_per_weight=bits, weight_bytes=total)


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
    names, held_as = Counter[str](), Counter[str]()
    for matrix in matrices:
        if isinstance(matrix, torch.Tensor):  # served in two bytes, whatever the file has
            name, nbytes = "float", _HALF_BYTES * math.prod(matrix.shape)
        else:
            name, nbytes = matrix.scheme.name, matrix.nbytes
        names[name] += 1
        held_as[name] += nbytes
    total = held_as.total()
    return Summary(
        schemes=dict(names.most_common()),
        held_as=dict(held_as),
        bits_per_weight=8 * total / count,
        weight_bytes=total,
        half_bytes=_HALF_BYTES * count,
        relative_error=relative_error,
    )
