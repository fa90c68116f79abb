"""Refining codes and scales by turns never loses more than before, and each step solves its equations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.quantization.calibration.input_statistics import output_loss
from backend.quantization.methods import gptq, refinement
from backend.quantization.methods.gptq import ActOrder, Gptq, damped
from backend.quantization.methods.refinement import refined
from backend.quantized_weights.grid import Codes, Grid
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from tests.backend.quantization.methods.test_gptq import correlated, every_order, random_weight, statistics
from tests.backend.quantization.schemes import ZEROS

# The two steps that `refined` takes by turns are private; each is tested alone, as one could make up for the other.
with_best_scales, descended = refinement._with_best_scales, refinement._descended
SCHEMES = [IntScheme(4, 32, zero) for zero in ZEROS] + [IntScheme(4), IntScheme(8), IntScheme(4, 64, "integer")]


def inputs(size: int, seed: int) -> torch.Tensor:
    """Correlated inputs of which some are always zero: float32 [rows, size]."""
    x = correlated(3 * size, size, seed)
    x[:, ::17] = 0
    return x


def hessian_of(size: int, seed: int) -> torch.Tensor:
    """The damped Hessian of such inputs."""
    return damped(statistics(inputs(size, seed)).hessian, 0.01)


def nearest(weight: torch.Tensor, scheme: IntScheme) -> Codes:
    grid = scheme.grid(weight)
    return Codes(grid.encode(weight), grid)


def rows_lose_no_more(weight: torch.Tensor, before: Codes, after: Codes, hessian: torch.Tensor) -> bool:
    """Whether no row loses more, up to rounding in float32."""
    old, new = (output_loss(weight.double() - c.grid.decode(c.codes), hessian) for c in (before, after))
    return bool((new <= old * (1 + 1e-4) + 1e-12).all())


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 9), groups=st.integers(1, 3), scheme=st.sampled_from(SCHEMES))
def test_no_row_loses_more(seed: int, rows: int, groups: int, scheme: IntScheme) -> None:
    """No row loses more after one or two refinements, the given codes are not changed, and the result packs exactly."""
    size = 64 * groups
    weight, hessian = random_weight(rows, size, seed), hessian_of(size, seed)
    before = nearest(weight, scheme)
    given_codes = before.codes.clone()
    after = refined(weight, before, scheme, hessian)
    assert torch.equal(before.codes, given_codes), "what came in has been written over"
    assert rows_lose_no_more(weight, before, after, hessian)
    assert rows_lose_no_more(weight, after, refined(weight, after, scheme, hessian), hessian)
    old, new = (output_loss(weight.double() - c.grid.decode(c.codes), hessian).sum() for c in (before, after))
    assert scheme.bits == 8 or rows < 4 or float(new) < float(old)
    assert int(after.codes.max()) <= scheme.levels
    assert torch.equal(IntLinear.of(scheme, after.codes, after.grid).unpack(), after.grid.decode(after.codes))


@pytest.mark.parametrize("scheme", SCHEMES, ids=[scheme.name for scheme in SCHEMES])
def test_each_step_alone_never_loses(scheme: IntScheme) -> None:
    """Each step alone gains on nearest codes, and loses nothing on codes that were refined for long."""
    weight, hessian = random_weight(64, 192, 8), hessian_of(192, 9)
    before = nearest(weight, scheme)

    def lost(codes: Codes) -> float:
        return float(output_loss(weight.double() - codes.grid.decode(codes.codes), hessian).sum())

    assert lost(with_best_scales(weight, before, scheme, hessian.float())) < lost(before)
    assert lost(descended(weight, before, hessian.float())) < lost(before)
    long = refined(weight, refined(weight, before, scheme, hessian), scheme, hessian)
    assert rows_lose_no_more(weight, long, with_best_scales(weight, long, scheme, hessian.float()), hessian)
    assert rows_lose_no_more(weight, long, descended(weight, long, hessian.float()), hessian)


@every_order
@pytest.mark.parametrize("scheme", [IntScheme(4, 32), IntScheme(4, 64, "integer")], ids=["int4-g32", "int4-asym-g64"])
def test_gptq_loses_less_with_refinement(
    act_order: ActOrder, scheme: IntScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ loses less with the refinement than without it."""
    weight, seen = random_weight(48, 192, 10), statistics(inputs(192, 11))

    def lost() -> torch.Tensor:
        (rounded,) = Gptq(act_order)([weight], seen, scheme)
        return output_loss(weight.double() - rounded.linear.unpack(), damped(seen.hessian, 0.01))

    with_it = lost()
    monkeypatch.setattr(gptq, "refined", lambda weight, codes, scheme, hessian: codes)
    without = lost()
    assert bool((with_it <= without * (1 + 1e-4)).all())
    assert float(with_it.sum()) < 0.99 * float(without.sum())


@every_order
@settings(max_examples=10)
@given(
    seed=st.integers(0, 10**6), exponent=st.integers(-12, 12), apart=st.integers(2, 17), scheme=st.sampled_from(SCHEMES)
)
def test_the_magnitude_of_inputs_changes_nothing(
    act_order: ActOrder, seed: int, exponent: int, apart: int, scheme: IntScheme
) -> None:
    """Scaling all inputs changes no weight, even where some inputs were always zero."""
    weight, x = random_weight(8, 128, seed), correlated(300, 128, seed)
    x[:, ::apart] = 0
    one, other = (Gptq(act_order)([weight], statistics(x * by), scheme)[0] for by in (1.0, 2.0**exponent))
    assert torch.equal(one.linear.unpack(), other.linear.unpack())


def test_rows_are_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solving rows in parts gives the scales of solving them together."""
    weight, hessian, scheme = random_weight(7, 128, 12), hessian_of(128, 13), IntScheme(4, 32, "integer")
    together = with_best_scales(weight, nearest(weight, scheme), scheme, hessian.float())
    # The bound on memory is no option; only huge matrices exceed it.
    monkeypatch.setattr(refinement, "_NUMBERS_AT_ONCE", 2 * 4**2)
    parts = with_best_scales(weight, nearest(weight, scheme), scheme, hessian.float())
    torch.testing.assert_close(parts.grid.scales, together.grid.scales, rtol=1e-3, atol=0)
    assert not torch.equal(parts.grid.scales, nearest(weight, scheme).grid.scales)


def test_blocked_descent_computes_what_single_columns_do() -> None:
    """The blocked descent gives the codes of one column after the other in float64."""
    size, scheme = 288, IntScheme(4, 32, "integer")
    weight, hessian = random_weight(6, size, 1), hessian_of(size, 2)
    before = nearest(weight, scheme)
    got = descended(weight, before, hessian.float())
    codes = before.codes.clone()
    for column in hessian.diagonal().float().argsort(descending=True, stable=True).tolist():
        off = weight.double() - before.grid.decode(codes).double()
        best = before.grid.decode(codes)[:, column] + (off @ hessian[:, column]) / hessian[column, column]
        codes[:, column] = before.grid.of_group(column // 32).encode(best.unsqueeze(1)).squeeze(1)
    # A value between two codes may go either way in float32, and what follows it with it.
    assert float((got.codes != codes).double().mean()) < 0.003


@pytest.mark.parametrize("scheme", SCHEMES, ids=[scheme.name for scheme in SCHEMES])
def test_scales_are_those_of_least_squares(scheme: IntScheme) -> None:
    """A weight that its codes represent exactly gets its own scales back from scales that are a tenth off."""
    weight, hessian = random_weight(5, 128, 3), hessian_of(128, 4).float()
    right = nearest(weight, scheme)
    sayable = right.grid.decode(right.codes)
    factors = 1 + 0.1 * torch.randn(right.grid.scales.shape, generator=torch.Generator().manual_seed(5))
    tied = scheme.zero != "minimum"
    off = Grid(right.grid.scales * factors, right.grid.offsets * (factors if tied else 1.0), scheme.levels)
    found = with_best_scales(sayable, Codes(right.codes, off), scheme, hessian)
    torch.testing.assert_close(found.grid.scales, right.grid.scales, rtol=2e-3, atol=0)


def test_groups_of_zeros_stay_zero() -> None:
    """Groups of zeros stay zero, though their equations are singular."""
    weight = random_weight(3, 96, 6)
    weight[:, 32:64] = 0
    scheme = IntScheme(4, 32, "integer")
    after = refined(weight, nearest(weight, scheme), scheme, hessian_of(96, 7))
    assert not after.grid.decode(after.codes)[:, 32:64].any()
