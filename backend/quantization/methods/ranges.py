"""Searches the range of each group's grid: clipping the largest weights gives the others smaller steps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from backend.quantized_weights.grid import Grid
from backend.quantized_weights.int_scheme import IntScheme

GroupLoss = Callable[[torch.Tensor], torch.Tensor]
"""Loss [out, groups] of weight errors [out, groups, width]."""

_SHRINKS = [1 - step / 20 for step in range(11)]


def searched_grid(weight: torch.Tensor, scheme: IntScheme, loss: GroupLoss) -> Grid:
    """The grid of a weight float32 [out, in] with the range of least loss for each group, at most the full range.

    Raises:
        CannotQuantize: the weight does not fit the scheme.
    """
    best = scheme.grid(weight)
    parts = weight.view(*best.scales.shape, -1)
    low, high = torch.aminmax(parts, dim=-1)
    least = torch.full_like(low, torch.inf)
    for shrink in _SHRINKS:
        grid = scheme.grid_of(low * shrink, high * shrink)
        lost = loss((grid.decode(grid.encode(weight)) - weight).view_as(parts))
        better = lost < least
        least = torch.where(better, lost, least)
        scales = torch.where(better, grid.scales, best.scales)
        best = Grid(scales, torch.where(better, grid.offsets, best.offsets), scheme.levels)
    return best


def by_inputs(importance: torch.Tensor) -> GroupLoss:
    """The sum of squared errors times the importance of their inputs, [groups * width]."""

    def loss(off: torch.Tensor) -> torch.Tensor:
        return (off.square() * importance.view(off.shape[1:])).sum(-1)

    return loss


def by_hessian(hessian: torch.Tensor, groups: int) -> GroupLoss:
    """The output loss of a group, by its block of the Hessian float32 [in, in]."""
    places = torch.arange(len(hessian)).view(groups, -1)
    of_groups = hessian[places.unsqueeze(2), places.unsqueeze(1)]  # [groups, width, width]

    def loss(off: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("ogi,gij->ogj", off, of_groups) * off).sum(-1)

    return loss
