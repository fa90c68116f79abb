"""Refines a rounded weight: optimises codes and scales alternately, each with the others fixed.

GPTQ rounds every column once. Coordinate descent (QuantEase, arXiv 2309.01885) repeats the rounding: with
``G = (W - Q)H``, proportional to the loss's gradient, the best value of column i with all others fixed is
``q_i + G_i / H_ii``, and its code is the nearest. The best scales of a row for fixed codes solve a linear system with
one unknown per group. No step increases the loss of a row by the given Hessian.
"""

from __future__ import annotations

import torch

from backend.quantization.calibration.input_statistics import output_loss
from backend.quantization.methods.one_thread import one_thread
from backend.quantized_weights.grid import Codes, Grid
from backend.quantized_weights.int_scheme import IntScheme

_TURNS = 4
"""Twice as many would reduce the loss by .1 to 2 %."""
_BLOCK = 128
_NUMBERS_AT_ONCE = 2**24
_RIDGE = 1e-4
"""Added to the diagonal of the system for scales, as a share of it: two nearly collinear groups would otherwise get
meaningless scales that cancel out."""


def refined(weight: torch.Tensor, codes: Codes, scheme: IntScheme, hessian: torch.Tensor) -> Codes:
    """Codes with no more output loss.

    Args:
        weight: float32 [out, in], columns in the order of the codes.
        codes: of the weight.
        hessian: [in, in], of the same columns, positive definite.
    """
    hessian = hessian.float()
    for _ in range(_TURNS):
        codes = _with_best_scales(weight, codes, scheme, hessian)
        codes = _descended(weight, codes, hessian)
    return codes


def _descended(weight: torch.Tensor, codes: Codes, hessian: torch.Tensor) -> Codes:
    """Updates each column once, by decreasing curvature.

    All tensors are transposed, [in, out], so that a column of the weight is contiguous.
    """
    grid, width = codes.grid, weight.shape[1] // codes.grid.scales.shape[1]
    kept = codes.codes.T.clone(memory_format=torch.contiguous_format)  # a copy, even of a single row
    values = grid.decode(codes.codes).T.contiguous()
    slopes = hessian @ (weight.T - values)
    for block in torch.split(hessian.diagonal().argsort(descending=True, stable=True), _BLOCK):
        within, of_block = hessian[block][:, block], slopes[block]
        changes = torch.empty_like(of_block)
        with one_thread():
            for at, column in enumerate(block.tolist()):
                of_group = grid.of_group(column // width)
                code = of_group.encode((values[column] + of_block[at] / within[at, at]).unsqueeze(1))
                value = of_group.decode(code).squeeze(1)
                changes[at] = value - values[column]
                of_block.addr_(within[at], changes[at], alpha=-1)
                kept[column], values[column] = code.squeeze(1), value
        slopes.addmm_(hessian[:, block], changes, alpha=-1)
    return Codes(kept.T.contiguous(), grid)


def _with_best_scales(weight: torch.Tensor, codes: Codes, scheme: IntScheme, hessian: torch.Tensor) -> Codes:
    """The scales of least loss for these codes and the present zeros or minima."""
    grid = codes.grid
    shape = (*grid.scales.shape, -1)
    if scheme.zero == "minimum":
        steps, fixed = codes.codes.view(shape).float(), grid.offsets
    else:
        zeros = grid.zeros
        steps, fixed = codes.codes.view(shape) - zeros.unsqueeze(-1), torch.zeros_like(zeros)
    target = ((weight.view(shape) - fixed.unsqueeze(-1)).flatten(1) @ hessian).view(shape)
    at_once = max(_NUMBERS_AT_ONCE // grid.scales.shape[1] ** 2, 1)
    parts = zip(torch.split(steps, at_once), torch.split(target, at_once), strict=True)
    scales = torch.cat([_least_squares(*rows, hessian) for rows in parts]).to(scheme.scale_dtype).float()
    scales = torch.where(scales > 0, scales, grid.scales)
    offsets = grid.offsets if scheme.zero == "minimum" else -zeros * scales
    found = Grid(scales, offsets, grid.levels)
    lost, before = (output_loss(weight - of.decode(codes.codes), hessian) for of in (found, grid))
    better = (lost < before).unsqueeze(1)
    scales, offsets = torch.where(better, scales, grid.scales), torch.where(better, offsets, grid.offsets)
    return Codes(codes.codes, Grid(scales, offsets, grid.levels))


def _least_squares(steps: torch.Tensor, target: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """Least-squares scales float32 [rows, groups] for steps [rows, groups, width].

    A row without a solution gets arbitrary scales: the caller compares them with the previous ones.

    Args:
        target: the weights minus their fixed offsets, times the Hessian: as ``steps``.
    """
    rows, groups, width = steps.shape
    products = torch.empty(rows, groups, groups)
    for group in range(groups):
        by_hessian = steps[:, group] @ hessian[group * width : (group + 1) * width]
        products[:, group] = (by_hessian.view_as(steps) * steps).sum(-1)
    diagonal = products.diagonal(dim1=1, dim2=2)
    ridged = products + torch.diag_embed(diagonal * _RIDGE + torch.finfo(torch.float32).tiny)
    solved: torch.Tensor
    solved, _ = torch.linalg.solve_ex(ridged.double(), (steps * target).sum(-1, keepdim=True).double())
    return solved.squeeze(-1).float()
