"""Codes and scales by turns: nothing loses more than before, and what is found is what the sums say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.quantization.calibration.input_statistics import output_loss
from backend.quantization.grid import Codes, Grid
from backend.quantization.int_scheme import IntLinear, IntScheme
from backend.quantization.methods import refinement
from backend.quantization.methods.gptq import damped
from backend.quantization.methods.refinement import refined
from tests.backend.quantization.methods.test_gptq import correlated, random_weight, statistics
from tests.backend.quantization.schemes import ZEROS

SCHEMES = [IntScheme(4, 32, zero) for zero in ZEROS] + [IntScheme(4), IntScheme(8), IntScheme(4, 64, "integer")]


def hessian_of(size: int, seed: int) -> torch.Tensor:
    """Of inputs of which some are always zero."""
    x = correlated(3 * size, size, seed)
    x[:, ::17] = 0
    return damped(statistics(x).hessian, 0.01)


def nearest(weight: torch.Tensor, scheme: IntScheme) -> Codes:
    grid = scheme.grid(weight)
    return Codes(grid.encode(weight), grid)


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), groups=st.integers(1, 3), scheme=st.sampled_from(SCHEMES))
def test_no_row_loses_more(seed: int, rows: int, groups: int, scheme: IntScheme) -> None:
    """From wherever it starts, but for what float32 rounds; several rows of four bits always have something to give.

    What is kept of the grid is the grid.
    """
    size = 64 * groups
    weight, hessian = random_weight(rows, size, seed), hessian_of(size, seed)
    before = nearest(weight, scheme)
    after = refined(weight, before, scheme, hessian)
    old, new = (output_loss(weight.double() - c.grid.decode(c.codes), hessian) for c in (before, after))
    assert bool((new <= old * (1 + 2e-3) + 1e-12).all())
    assert scheme.bits == 8 or rows < 4 or float(new.sum()) < float(old.sum())
    assert int(after.codes.max()) <= scheme.levels
    assert torch.equal(IntLinear.of(scheme, after.codes, after.grid).unpack(), after.grid.decode(after.codes))


def test_blocks_compute_what_single_columns_do() -> None:
    """Against one column after the other in float64, slopes computed anew for each."""
    size, scheme = 288, IntScheme(4, 32, "integer")
    weight, hessian = random_weight(6, size, 1), hessian_of(size, 2)
    before = nearest(weight, scheme)
    got = refinement._descended(weight, before, hessian.float())
    codes = before.codes.clone()
    for column in hessian.diagonal().float().argsort(descending=True, stable=True).tolist():
        off = weight.double() - before.grid.decode(codes).double()
        best = before.grid.decode(codes)[:, column] + (off @ hessian[:, column]) / hessian[column, column]
        codes[:, column] = before.grid.of_group(column // 32).encode(best.unsqueeze(1)).squeeze(1)
    # A value between two codes may go either way in float32, and what follows it with it.
    assert float((got.codes != codes).double().mean()) < 0.003


@pytest.mark.parametrize("scheme", SCHEMES, ids=[scheme.name for scheme in SCHEMES])
def test_scales_are_those_of_least_squares(scheme: IntScheme) -> None:
    """A weight that codes can say in full gets its own scales back, from others that are a tenth off."""
    weight, hessian = random_weight(5, 128, 3), hessian_of(128, 4).float()
    right = nearest(weight, scheme)
    sayable = right.grid.decode(right.codes)
    factors = 1 + 0.1 * torch.randn(right.grid.scales.shape, generator=torch.Generator().manual_seed(5))
    tied = scheme.zero != "minimum"
    off = Grid(right.grid.scales * factors, right.grid.offsets * (factors if tied else 1.0), scheme.levels)
    found = refinement._with_best_scales(sayable, Codes(right.codes, off), scheme, hessian)
    torch.testing.assert_close(found.grid.scales, right.grid.scales, rtol=2e-3, atol=0)


def test_weights_of_nothing_stay_nothing() -> None:
    """Their groups have a scale of zero, and no equation says anything of them."""
    weight = random_weight(3, 96, 6)
    weight[:, 32:64] = 0
    scheme = IntScheme(4, 32, "integer")
    after = refined(weight, nearest(weight, scheme), scheme, hessian_of(96, 7))
    assert not after.grid.decode(after.codes)[:, 32:64].any()
