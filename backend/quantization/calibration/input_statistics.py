"""What a linear layer has seen of the calibration data, in a size that does not grow with the data."""

from __future__ import annotations

import torch


class InputStatistics:
    """Sums over the rows that a linear layer was given.

    Args:
        size: of a row.
    """

    def __init__(self, size: int) -> None:
        self.rows = 0
        self._products = torch.zeros(size, size, dtype=torch.float64)
        self._magnitudes = torch.zeros(size, dtype=torch.float64)

    def add(self, x: torch.Tensor) -> None:
        """Rows float32 [n, size]."""
        self.rows += len(x)
        self._products += x.T @ x
        self._magnitudes += x.abs().sum(0)

    @property
    def hessian(self) -> torch.Tensor:
        """``2 / n · XᵀX``, float64 [size, size]: of the squared error of an output, by the weights of that output."""
        return self._products * (2 / max(self.rows, 1))

    @property
    def mean_magnitude(self) -> torch.Tensor:
        """Mean of ``|x|`` of each input, float64 [size]."""
        return self._magnitudes / max(self.rows, 1)


def output_loss(difference: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Twice the mean squared error of each output of a weight that is off by so much: [out], of [out, in]."""
    return ((difference @ hessian.to(difference.dtype)) * difference).sum(1)


def relative_output_error(weight: torch.Tensor, kept: torch.Tensor, hessian: torch.Tensor) -> float:
    """``‖X(W - Q)ᵀ‖ / ‖XWᵀ‖`` of the rows that the Hessian is of; 0 where they give nothing."""
    whole = float(output_loss(weight, hessian).sum())
    return (max(float(output_loss(weight - kept, hessian).sum()), 0.0) / whole) ** 0.5 if whole > 0 else 0.0
