"""Schemes, sizes and loss of a model's weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from backend.model_loader.linears import linears
from backend.model_loader.weights import ModelWeights
from backend.models.partition import ModelPart
from backend.quantization.methods.report import Divergence
from backend.quantized_weights.quantized_linear import QuantizedLinear

_HALF_BYTES = 2


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all matrices of the layers and the head, without the embedding."""

    schemes: dict[str, int]
    """Number of matrices by scheme, the most frequent first."""
    held_as: dict[str, int]
    """Bytes by the form in the runner, which may be wider than the scheme."""
    bits_per_weight: float
    weight_bytes: int
    half_bytes: int
    """Bytes of the same matrices in 16 bits."""
    relative_error: float | None
    """RMS error relative to the RMS of the weights; None: the original weights are unknown."""
    divergence: Divergence | None = None
    """From the original model, as measured when the layers were quantised."""

    def held(self, forms: Mapping[str, int]) -> Summary:
        """The same for a runner with these bytes by form."""
        total = sum(forms.values())
        bits = 8 * total * _HALF_BYTES / self.half_bytes
        return replace(self, held_as=dict(forms), bits_per_weight=bits, weight_bytes=total)


def joined(parts: Sequence[tuple[ModelPart, Summary | None]]) -> Summary | None:
    """Of a whole model, from the summaries of its parts; None: none of them has quantised weights.

    A matrix that is divided is counted once. Bytes are those of all parts together.
    """
    known = [(part, summary) for part, summary in parts if summary is not None]
    if not known:
        return None
    schemes, held_as = Counter[str](), Counter[str]()
    for part, summary in known:
        held_as.update(summary.held_as)
        if part.tensor_rank == 0:
            schemes.update(summary.schemes)
    half_bytes = sum(summary.half_bytes for _, summary in known)
    total = held_as.total()
    return Summary(
        dict(schemes.most_common()), dict(held_as), 8 * total * _HALF_BYTES / half_bytes, total, half_bytes, None
    )


@dataclass(slots=True)
class RoundingError:
    """Rounding loss, summed over matrices."""

    _lost: float = 0.0
    _whole: float = 0.0

    def note(self, weight: torch.Tensor, packed: QuantizedLinear) -> None:
        """Adds the loss of a weight [out, in]."""
        whole = weight.float()
        self._lost += float((packed.unpack() - whole).square().sum(dtype=torch.float64))
        self._whole += float(whole.square().sum(dtype=torch.float64))

    @property
    def relative(self) -> float | None:
        """See `Summary.relative_error`; None: nothing has been rounded."""
        return math.sqrt(self._lost / self._whole) if self._whole else None


def summarise(weights: ModelWeights, relative_error: float | None = None) -> Summary | None:
    """The summary of the weights; None if none of them is quantised."""
    # A stage of a pipeline that computes no logits has a head of no rows.
    matrices = [matrix for matrix in (*linears(weights).values(), weights.head) if matrix.shape[0]]
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
