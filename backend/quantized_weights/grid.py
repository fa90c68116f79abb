"""Uniform grids of integer codes: one for each group of inputs of each output."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Grid:
    """``weight = scale * code + offset``.

    Args:
        scales: float32 [out, groups]; 0 if all weights of a group are the offset.
        offsets: float32 [out, groups].
        levels: the highest code; the lowest is 0.
    """

    scales: torch.Tensor
    offsets: torch.Tensor
    levels: int

    def encode(self, weight: torch.Tensor) -> torch.Tensor:
        """The nearest codes of weights [out, in]: uint8 [out, in]."""
        columns = weight.float().reshape(*self.scales.shape, -1)
        steps = torch.where(self.scales > 0, self.scales, torch.inf).unsqueeze(-1)
        codes = torch.round((columns - self.offsets.unsqueeze(-1)) / steps).clamp(0, self.levels)
        return codes.to(torch.uint8).flatten(1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The weights of codes [out, in]: float32 [out, in]."""
        columns = codes.reshape(*self.scales.shape, -1).float()
        return (columns * self.scales.unsqueeze(-1) + self.offsets.unsqueeze(-1)).flatten(1)

    @property
    def zeros(self) -> torch.Tensor:
        """Zero points, whole numbers float32 [out, groups], if the grid contains zero; 0 if a scale is 0."""
        return torch.round(-self.offsets / torch.where(self.scales > 0, self.scales, 1.0))

    def of_group(self, group: int) -> Grid:
        """The grid of one group alone: [out, 1]."""
        return Grid(self.scales[:, group : group + 1], self.offsets[:, group : group + 1], self.levels)


@dataclass(frozen=True, slots=True)
class Codes:
    """Codes uint8 [out, in] and their grid; a group is a range of consecutive columns."""

    codes: torch.Tensor
    grid: Grid
