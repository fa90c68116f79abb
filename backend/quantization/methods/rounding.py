"""The contract of methods that round weights, and the result for one weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from backend.quantization.calibration.input_statistics import InputStatistics
from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight, and how it was rounded."""

    linear: QuantizedLinear
    damping: float | None = None
    """Share of the Hessian's mean diagonal that was added to it; None: no Hessian was inverted."""
    notes: tuple[str, ...] = ()
    """Deviations from the request, in words."""


class Rounding(Protocol):
    """Chooses the codes of weights that have one input."""

    def __call__(self, weights: Sequence[torch.Tensor], seen: InputStatistics, scheme: Scheme) -> list[Rounded]:
        """Rounds weights float32 [out, in], each with its own outputs; results are in their order.

        Raises:
            CannotQuantize: a weight does not fit the scheme.
        """


def round_to_nearest(weights: Sequence[torch.Tensor], seen: InputStatistics, scheme: Scheme) -> list[Rounded]:
    """The rounding that uses only the weights."""
    return [Rounded(scheme.pack(weight)) for weight in weights]
