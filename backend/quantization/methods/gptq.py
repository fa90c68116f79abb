"""GPTQ (arXiv 2210.17323): rounds columns one after the other; later columns compensate for each column's error.

The rows of a weight share one Hessian of the squared error of their outputs, ``H = 2/n XᵀX``. When column i has been
rounded, the best change of the columns after it is ``-(w_i - q_i) / U_ii * U_i,i+1..`` with ``H⁻¹ = UᵀU``, U upper
triangular. Changes are applied at once within a block of columns, and to all later blocks in one product at its end.
``refinement.py`` then refines codes and scales alternately, which the paper does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from backend.quantization.calibration.input_statistics import InputStatistics
from backend.quantization.methods.one_thread import one_thread
from backend.quantization.methods.ranges import by_inputs, searched_grid
from backend.quantization.methods.refinement import refined
from backend.quantization.methods.rounding import Rounded, round_to_nearest
from backend.quantized_weights.grid import Codes, Grid
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.quantized_linear import Scheme

ActOrder = Literal["none", "weight", "order"]
"""Whether columns are rounded by decreasing diagonal of the Hessian. ``weight``: yes, in their original groups, whose
scales are fixed beforehand (static groups). ``order``: yes, in groups of consecutive inputs in the new order, which is
stored with the weight (``IntLinear.order``)."""
ACT_ORDERS: tuple[ActOrder, ...] = ("none", "weight", "order")

_DAMPING = (0.01, 0.1, 1.0)
_BLOCK = 128
_FEWEST_ROWS = 0.25
"""Rows for each input; a Hessian of fewer rows is mostly sampling noise."""


@dataclass(frozen=True, slots=True)
class Gptq:
    """See `Rounding`. Schemes other than `IntScheme` have no grid: they round to nearest."""

    act_order: ActOrder = "weight"

    def __call__(self, weights: Sequence[torch.Tensor], seen: InputStatistics, scheme: Scheme) -> list[Rounded]:
        """Rounds all weights as one: rows are independent of each other and share the Hessian."""
        if not isinstance(scheme, IntScheme):
            return round_to_nearest(weights, seen, scheme)
        if seen.rows < _FEWEST_ROWS * weights[0].shape[1]:
            return _nearest(weights, seen, scheme, f"only {seen.rows} rows of calibration data came here")
        factor, damping = inverse_factor(seen.hessian, self.act_order)
        if factor is None:
            return _nearest(weights, seen, scheme, "the Hessian is not positive definite, however damped")
        weight = torch.cat([part.float() for part in weights])
        hessian = damped(seen.hessian, damping)
        with one_thread():
            codes = rounded_codes(weight, factor, scheme, self.act_order == "weight", _importance(seen))
        if self.act_order == "order":
            weight, hessian = weight[:, factor.order], hessian[factor.order][:, factor.order]
        codes = refined(weight, codes, scheme, hessian)
        order = factor.order.int() if self.act_order == "order" else None
        notes = () if damping == _DAMPING[0] else (f"the Hessian needed a damping of {damping:.0%}",)
        sizes = [len(part) for part in weights]
        split = (torch.split(part, sizes) for part in (codes.codes, codes.grid.scales, codes.grid.offsets))
        return [
            Rounded(IntLinear.of(scheme, rows, Grid(scales, offsets, scheme.levels), order), damping, notes)
            for rows, scales, offsets in zip(*split, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class InverseFactor:
    """Factor of an inverse Hessian.

    Args:
        upper: float64 [in, in], upper triangular U with ``H⁻¹ = UᵀU``, inputs in ``order``.
        order: int64 [in], the inputs in the order in which they are rounded.
    """

    upper: torch.Tensor
    order: torch.Tensor


def inverse_factor(hessian: torch.Tensor, act_order: ActOrder) -> tuple[InverseFactor | None, float]:
    """The factor of a Hessian float64 [in, in], and the damping with which it is positive definite.

    The column of an input that was always zero is rounded to nearest.

    Returns:
        None in place of the factor if no damping suffices.
    """
    diagonal = hessian.diagonal()
    size = len(diagonal)
    order = torch.arange(size) if act_order == "none" else diagonal.argsort(descending=True, stable=True)
    ordered = hessian[order][:, order].double()
    for damping in _DAMPING:
        # Cholesky of the flipped matrix: H = R·Rᵀ with R upper triangular, so U = R⁻¹ without forming H⁻¹.
        lower, failed = torch.linalg.cholesky_ex(damped(ordered, damping).flip(0, 1))
        if int(failed) == 0 and bool(torch.isfinite(lower).all()):
            inverse = torch.linalg.solve_triangular(lower.flip(0, 1), torch.eye(size, dtype=lower.dtype), upper=True)
            if bool(torch.isfinite(inverse).all()):
                return InverseFactor(inverse, order), damping
    return None, _DAMPING[-1]


def damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """A Hessian plus ``damping`` times its mean diagonal; the unit matrix in place of a zero Hessian.

    An input that was always zero then counts in proportion to the others, with which it may share a scale.
    """
    added = damping * float(hessian.diagonal().mean())
    return hessian + torch.eye(len(hessian), dtype=hessian.dtype) * (added or 1.0)


def rounded_codes(
    weight: torch.Tensor,
    factor: InverseFactor,
    scheme: IntScheme,
    static_groups: bool,
    importance: torch.Tensor | None = None,
) -> Codes:
    """Rounds a weight float32 [out, in].

    Args:
        static_groups: grids are computed from the unchanged weight, and codes are returned in the inputs' order;
            else a grid is computed when its group is reached, and codes are in the factor's order.
        importance: float32 [in], weights the loss that a group's range minimises; None: the range of its weights.

    Raises:
        CannotQuantize: the weight does not fit the scheme.
    """
    grid = _grid(scheme, weight, importance)
    size = weight.shape[1]
    width = size // grid.scales.shape[1]
    in_order = None if importance is None else importance[factor.order]
    columns = weight.float()[:, factor.order].T.contiguous()
    group_of = (factor.order if static_groups else torch.arange(size)) // width
    found: list[Grid] = []
    groups = group_of.tolist()
    kept = torch.empty(size, len(weight), dtype=torch.uint8)
    for first in range(0, size, step := _columns_at_once(width, size)):
        last = min(first + step, size)
        upper = factor.upper[first:last].float()
        errors = torch.empty(last - first, len(weight))
        for column in range(first, last):
            group = groups[column]
            if not static_groups and column % width == 0:
                part = slice(column, column + width)
                found.append(_grid(scheme, columns[part].T.contiguous(), None if in_order is None else in_order[part]))
            of_group = grid.of_group(group) if static_groups else found[group]
            value = columns[column]
            codes = of_group.encode(value.unsqueeze(1))
            kept[column] = codes.squeeze(1)
            row = upper[column - first]
            error = (value - of_group.decode(codes).squeeze(1)) / row[column]
            columns[column + 1 : last].addr_(row[column + 1 : last], error, alpha=-1)
            errors[column - first] = error
        columns[last:].addmm_(upper[:, last:].T, errors, alpha=-1)
    if static_groups:
        return Codes(torch.empty_like(kept).index_copy_(0, factor.order, kept).T.contiguous(), grid)
    scales, offsets = (torch.cat(parts, dim=1) for parts in zip(*((g.scales, g.offsets) for g in found), strict=True))
    return Codes(kept.T.contiguous(), Grid(scales, offsets, scheme.levels))


def _columns_at_once(width: int, size: int) -> int:
    """Block width: whole groups, as a grid must include all compensation; a single group's grid is computed first."""
    return _BLOCK if width == size else width * max(_BLOCK // width, 1)


def _importance(seen: InputStatistics) -> torch.Tensor:
    """Importance of inputs, float32 [in]; an input that was always zero gets the mean."""
    diagonal = seen.hessian.diagonal().float()
    return torch.where(diagonal > 0, diagonal, diagonal.mean())


def _grid(scheme: IntScheme, weight: torch.Tensor, importance: torch.Tensor | None) -> Grid:
    return scheme.grid(weight) if importance is None else searched_grid(weight.float(), scheme, by_inputs(importance))


def _nearest(weights: Sequence[torch.Tensor], seen: InputStatistics, scheme: Scheme, why: str) -> list[Rounded]:
    note = f"rounded to nearest: {why}"
    return [Rounded(part.linear, notes=(note,)) for part in round_to_nearest(weights, seen, scheme)]
