"""Statistics of a linear layer's calibration inputs, in a size that does not grow with the data."""

from __future__ import annotations

import torch


class InputStatistics:
    """Sums over a linear layer's input rows.

    Args:
        size: length of a row.
    """

    def __init__(self, size: int) -> None:
        self.rows = 0
        self._products = torch.zeros(size, size, dtype=torch.float64)
        self._magnitudes = torch.zeros(size, dtype=torch.float64)

    def add(self, x: torch.Tensor) -> None:
        """Adds float32 [n, size]."""
        self.rows += len(x)
        self._products += x.T @ x
        self._magnitudes += x.abs().sum(0)

    @property
    def hessian(self) -> torch.Tensor:
        """``2 / n · XᵀX``, float64 [size, size]: Hessian of an output's squared error in that output's weights."""
        return self._products * (2 / max(self.rows, 1))

    @property
    def mean_magnitude(self) -> torch.Tensor:
        """Mean of ``|x|`` of each input, float64 [size]."""
        return self._magnitudes / max(self.rows, 1)


def output_loss(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Twice the mean squared error of each output, [out], for a weight error ``difference`` [out, in]."""
    return ((difference @ hessian.to(difference.dtype)) * difference).sum(1)


def relative_output_error(weight: torch.Tensor, kept: torch.Tensor, hessian: torch.Tensor) -> float:
    """``‖X(W - Q)ᵀ‖ / ‖XWᵀ‖`` over the rows of the Hessian; 0 if ``XWᵀ`` is zero."""
    whole = float(output_loss(weight, hessian).sum())
    return (max(float(output_loss(weight - kept, hessian).sum()), 0.0) / whole) ** 0.5 if whole > 0 else 0.0
