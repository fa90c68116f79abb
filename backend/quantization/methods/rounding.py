"""What a method makes of one weight, and the contract of methods that round weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from backend.quantization.calibration.input_statistics import InputStatistics
from backend.quantized_weights.quantized_linear import QuantizedLinear, Scheme


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight as it will be kept, and what is worth knowing of how it came about."""

    linear: QuantizedLinear
    damping: float | None = None
    """Share of the Hessian's mean diagonal that was added to it; None: no Hessian was inverted."""
    notes: tuple[str, ...] = ()
    """What did not go as asked, in words for people."""


class Rounding(Protocol):
    """Chooses the codes of weights that have one input."""

    def __call__(self, weights: Sequence[torch.Tensor], seen: InputStatistics, scheme: Scheme) -> list[Rounded]:
        """Weights float32 [out, in], each with its own outputs, to what is kept of them, in their order.

        Raises:
            CannotQuantize: a weight does not fit the scheme.
        """


def round_to_nearest(weights: Sequence[torch.Tensor], seen: InputStatistics, scheme: Scheme) -> list[Rounded]:
    """The rounding that looks at nothing but the weights."""
    return [Rounded(scheme.pack(weight)) for weight in weights]
