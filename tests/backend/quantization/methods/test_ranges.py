"""The range of each group of each output is the best of the candidates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.quantization.methods.ranges import by_hessian, by_inputs, searched_grid
from backend.quantized_weights.int_scheme import IntScheme
from backend.quantized_weights.quantized_linear import CannotQuantize
from tests.backend.quantization.schemes import ZEROS, weights

schemes = st.sampled_from([IntScheme(4, 32, zero) for zero in ZEROS] + [IntScheme(4), IntScheme(8, 64)])


@settings(max_examples=30)
@given(weight=weights(), scheme=schemes, seed=st.integers(0, 1000))
def test_no_group_loses_more_than_with_its_full_range(weight: torch.Tensor, scheme: IntScheme, seed: int) -> None:
    """No group loses more with its searched range than with its full range, weighted by its inputs."""
    importance = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(seed)) + 0.01
    groups = scheme.groups(weight.shape[1])
    loss = by_inputs(importance)
    searched, full = (
        loss((grid.decode(grid.encode(weight)) - weight).view(len(weight), groups, -1))
        for grid in (searched_grid(weight, scheme, loss), scheme.grid(weight))
    )
    assert bool((searched <= full).all())


def test_an_outlier_that_no_input_reaches_is_cut_off() -> None:
    """An outlier weight whose input is almost zero is clipped to half of the range; one with a large input is kept."""
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[:, 5] = 0.2
    scheme, importance = IntScheme(4, 64), torch.ones(64)
    for worth, kept in ((1e-6, 0.1), (1e3, 0.2)):
        importance[5] = worth
        grid = searched_grid(weight, scheme, by_inputs(importance))
        got = grid.decode(grid.encode(weight))[:, 5]
        assert bool(((got - kept).abs() <= grid.scales[:, 0]).all())


def test_a_diagonal_hessian_is_the_importance_of_inputs() -> None:
    """The loss by a diagonal Hessian equals the loss by input importance."""
    importance = torch.rand(96, generator=torch.Generator().manual_seed(3))
    off = torch.randn(4, 3, 32, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(by_hessian(torch.diag(importance), 3)(off), by_inputs(importance)(off))


def test_the_search_refuses_what_its_scheme_refuses() -> None:
    """The search refuses a shape that its scheme refuses, with the scheme's message."""
    with pytest.raises(CannotQuantize, match="multiples of 64"):
        searched_grid(torch.ones(2, 96), IntScheme(4, 64), by_inputs(torch.ones(96)))
