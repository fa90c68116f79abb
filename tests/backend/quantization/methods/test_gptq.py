"""GPTQ loses less of a layer's outputs than rounding to nearest, and computes the paper's algorithm."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.quantization.calibration.input_statistics import InputStatistics, output_loss
from backend.quantization.methods.gptq import ACT_ORDERS, ActOrder, Gptq, inverse_factor, rounded_codes
from backend.quantization.methods.rounding import Rounded
from backend.quantized_weights.int_scheme import IntLinear, IntScheme
from backend.quantized_weights.nf4_scheme import Nf4Scheme
from tests.backend.quantization.schemes import ZEROS

every_order = pytest.mark.parametrize("act_order", ACT_ORDERS)


def correlated(rows: int, size: int, seed: int) -> torch.Tensor:
    """Correlated inputs of unlike magnitudes: float32 [rows, size]."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(size // 4, size, generator=generator)
    noise = torch.randn(rows, size, generator=generator)
    magnitudes = torch.exp(torch.randn(size, generator=generator))
    return (torch.randn(rows, size // 4, generator=generator) @ mixing / 4 + noise / 2) * magnitudes


def statistics(*batches: torch.Tensor) -> InputStatistics:
    """What was seen of some batches of rows."""
    seen = InputStatistics(batches[0].shape[1])
    for batch in batches:
        seen.add(batch)
    return seen


def random_weight(rows: int, size: int, seed: int) -> torch.Tensor:
    """float32 [rows, size]."""
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)) * 0.05


def loss(weight: torch.Tensor, rounded: Rounded, x: torch.Tensor) -> float:
    """``|X(W - Q)ᵀ|²``"""
    return float((x.double() @ (weight - rounded.linear.unpack()).double().T).square().sum())


@every_order
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(16, 32),
    groups=st.integers(2, 5),
    scheme=st.sampled_from([IntScheme(4, 32, zero) for zero in ZEROS] + [IntScheme(4), IntScheme(8)]),
)
def test_gptq_loses_less_than_rounding_to_nearest(
    act_order: ActOrder, seed: int, rows: int, groups: int, scheme: IntScheme
) -> None:
    """GPTQ loses less than rounding to nearest on correlated inputs, for every grouping and column order."""
    size = 32 * groups
    x = correlated(4 * size, size, seed)
    weight = random_weight(rows, size, seed + 1)
    (rounded,) = Gptq(act_order)([weight], statistics(x), scheme)
    assert rounded.damping == 0.01
    assert not rounded.notes
    assert loss(weight, rounded, x) < loss(weight, Rounded(scheme.pack(weight)), x)


@every_order
@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6), scheme=st.sampled_from([IntScheme(4, 32), IntScheme(4, 64, "integer"), IntScheme(8)])
)
def test_gptq_rounds_to_nearest_on_uncorrelated_inputs(act_order: ActOrder, seed: int, scheme: IntScheme) -> None:
    """GPTQ with the unit matrix as its Hessian rounds to nearest, as no column can correct another."""
    weight = random_weight(3, 128, seed)
    factor, _ = inverse_factor(torch.eye(128, dtype=torch.float64), act_order)
    assert factor is not None
    got = rounded_codes(weight, factor, scheme, static_groups=act_order == "weight")
    assert torch.equal(got.grid.decode(got.codes), scheme.pack(weight).unpack())


@pytest.mark.parametrize("act_order", ["none", "order", "weight"])
@pytest.mark.parametrize("group", [32, 96, None])
def test_blocks_compute_what_single_columns_do(act_order: ActOrder, group: int | None) -> None:
    """The blocked algorithm gives the codes of the paper's column by column algorithm in float64."""
    size, scheme = 288, IntScheme(4, group)
    x = correlated(600, size, seed=5).double()
    hessian, weight = statistics(x.float()).hessian, random_weight(6, size, seed=6)
    factor, damping = inverse_factor(hessian, act_order)
    assert factor is not None
    got = rounded_codes(weight, factor, scheme, static_groups=act_order == "weight")

    order, width = factor.order, group or size
    left = (hessian + damping * hessian.diagonal().mean() * torch.eye(size, dtype=torch.float64))[order][:, order]
    inverse = torch.linalg.inv(left)
    columns, original = weight.double()[:, order], scheme.grid(weight)
    expected = torch.empty(6, size, dtype=torch.uint8)
    of_group = original.of_group(0)
    for column in range(size):
        if act_order == "weight":
            of_group = original.of_group(int(order[column]) // width)
        elif column % width == 0:
            low, high = torch.aminmax(columns[:, column : column + width].float(), dim=1)
            of_group = scheme.grid_of(low.unsqueeze(1), high.unsqueeze(1))
        code = of_group.encode(columns[:, column : column + 1])
        expected[:, int(order[column]) if act_order == "weight" else column] = code.squeeze(1)
        error = (columns[:, column] - of_group.decode(code).squeeze(1).double()) / inverse[column, column]
        columns[:, column:] -= torch.outer(error, inverse[column, column:])
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    # A value between two codes may go either way in float32, and what follows it with it.
    assert float((got.codes != expected).double().mean()) < 0.003


@every_order
def test_many_weights_are_rounded_as_if_alone(act_order: ActOrder) -> None:
    """Weights that share a Hessian are each rounded as if alone."""
    seen, scheme = statistics(correlated(300, 64, seed=1), correlated(100, 64, seed=2)), IntScheme(4, 32)
    weights = [random_weight(rows, 64, seed=rows) for rows in (5, 3, 8)]
    together = Gptq(act_order)(weights, seen, scheme)
    for weight, rounded in zip(weights, together, strict=True):
        (alone,) = Gptq(act_order)([weight], seen, scheme)
        assert rounded.linear.shape == tuple(weight.shape)
        torch.testing.assert_close(rounded.linear.unpack(), alone.linear.unpack())


def test_act_order_keeps_the_input_order_where_groups_follow_it() -> None:
    """Act-order `order` keeps the order of inputs with the weight, and the other orders keep none."""
    x, weight, scheme = correlated(400, 128, seed=3), random_weight(4, 128, seed=4), IntScheme(4, 32)
    seen = statistics(x)
    linear = Gptq("order")([weight], seen, scheme)[0].linear
    assert isinstance(linear, IntLinear)
    assert linear.order is not None
    assert linear.order.tolist() == seen.hessian.diagonal().argsort(descending=True, stable=True).tolist()
    assert float((linear.unpack() - weight).abs().max()) < 0.1  # not permuted: weights are about .05 apart
    assert torch.corrcoef(torch.stack([linear.unpack().flatten(), weight.flatten()]))[0, 1] > 0.95
    for act_order in ("none", "weight"):
        straight = Gptq(act_order)([weight], seen, scheme)[0].linear
        assert isinstance(straight, IntLinear)
        assert straight.order is None


@every_order
def test_inputs_that_were_never_seen_are_rounded_to_nearest(act_order: ActOrder) -> None:
    """Inputs that are zero in all calibration data are rounded about as well as to nearest."""
    x, weight, scheme = correlated(400, 128, seed=8), random_weight(4, 128, seed=9), IntScheme(8)
    x[:, 40:48] = 0
    (rounded,) = Gptq(act_order)([weight], statistics(x), scheme)
    assert not rounded.notes
    off, nearest = ((linear.unpack() - weight)[:, 40:48] for linear in (rounded.linear, scheme.pack(weight)))
    assert float(off.norm()) < 1.5 * float(nearest.norm())


class Broken(InputStatistics):
    """Statistics with a Hessian that no rows can have."""

    def __init__(self, smallest: float) -> None:
        super().__init__(32)
        self.rows, self._smallest = 1000, smallest

    @property
    def hessian(self) -> torch.Tensor:
        return torch.diag(torch.tensor([1.0] * 31 + [self._smallest], dtype=torch.float64))


@pytest.mark.parametrize(
    ("smallest", "damping", "note"),
    [
        (-0.05, 0.1, "the Hessian needed a damping of 10%"),
        (-0.5, 1.0, "the Hessian needed a damping of 100%"),
        (-3.0, None, "rounded to nearest: the Hessian is not positive definite, however damped"),
        (float("nan"), None, "rounded to nearest: the Hessian is not positive definite, however damped"),
    ],
)
def test_an_indefinite_hessian_is_damped_more_with_a_note(smallest: float, damping: float | None, note: str) -> None:
    """An indefinite Hessian is damped by 10%, then 100%, then the weight is rounded to nearest; a note says which."""
    weight, scheme = random_weight(2, 32, seed=1), IntScheme(4, 32)
    (rounded,) = Gptq()([weight], Broken(smallest), scheme)
    assert (rounded.damping, rounded.notes) == (damping, (note,))
    assert bool(torch.isfinite(rounded.linear.unpack()).all())
    if damping is None:
        assert torch.equal(rounded.linear.unpack(), scheme.pack(weight).unpack())


def test_fewer_than_sixteen_rows_round_to_nearest() -> None:
    """A weight with fewer than 16 rows of calibration data is rounded to nearest, and a note says so."""
    weight, scheme = random_weight(2, 64, seed=1), IntScheme(4, 32)
    (rounded,) = Gptq()([weight], statistics(correlated(15, 64, seed=1)), scheme)
    assert rounded.notes == ("rounded to nearest: only 15 rows of calibration data came here",)
    assert torch.equal(rounded.linear.unpack(), scheme.pack(weight).unpack())
    assert not Gptq()([weight], statistics(correlated(16, 64, seed=1)), scheme)[0].notes


def test_a_scheme_without_a_grid_rounds_to_nearest() -> None:
    """GPTQ with a scheme without a uniform grid, such as NF4, rounds to nearest."""
    weight, scheme = random_weight(2, 64, seed=1), Nf4Scheme()
    (rounded,) = Gptq()([weight], statistics(correlated(100, 64, seed=1)), scheme)
    assert torch.equal(rounded.linear.unpack(), scheme.pack(weight).unpack())


def test_the_hessian_is_that_of_the_squared_error() -> None:
    """Half of ``d H dᵀ`` is the mean squared error of an output, however the inputs are batched."""
    x, difference = correlated(50, 64, seed=1), random_weight(3, 64, seed=2)
    seen = statistics(x[:7], x[7:30], x[30:])
    expected = (x @ difference.T).square().mean(0)
    torch.testing.assert_close(output_loss(difference, seen.hessian) / 2, expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(seen.mean_magnitude.float(), x.abs().mean(0))
