"""Budgets are held, and no choice within them is better than the chosen one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backend.quantization.methods.allocation import Choice, least_loss, least_size
from backend.quantized_weights.quantized_linear import CannotQuantize

Parts = list[list[Choice]]

choices = st.builds(Choice, st.integers(0, 60), st.floats(0, 10).map(lambda loss: round(loss, 3)))
small_parts = st.lists(st.lists(choices, min_size=1, max_size=3), min_size=1, max_size=5)


def size_and_loss(parts: Parts, indices: Sequence[int]) -> tuple[int, float]:
    """Sums over what was chosen."""
    chosen = [part[index] for part, index in zip(parts, indices, strict=True)]
    return sum(choice.size for choice in chosen), sum(choice.loss for choice in chosen)


def everything(parts: Parts) -> list[tuple[int, float]]:
    """Sums over every possible choice."""
    return [size_and_loss(parts, indices) for indices in itertools.product(*(range(len(part)) for part in parts))]


@settings(max_examples=60)
@given(parts=small_parts, budget=st.integers(0, 200))
def test_nothing_within_a_size_loses_less(parts: Parts, budget: int) -> None:
    """No choice within the size loses less, by brute force; a size below the smallest forms is refused."""
    within = [loss for size, loss in everything(parts) if size <= budget]
    if not within:
        with pytest.raises(CannotQuantize, match=f"the budget is {budget}"):
            least_loss(parts, budget)
        return
    size, loss = size_and_loss(parts, least_loss(parts, budget))
    assert size <= budget
    assert loss == pytest.approx(min(within))


@settings(max_examples=60)
@given(parts=small_parts, budget=st.floats(0, 30))
def test_nothing_within_a_loss_is_smaller(parts: Parts, budget: float) -> None:
    """No choice within the loss is smaller, by brute force; a loss below the best forms' is refused."""
    within = [size for size, loss in everything(parts) if loss <= budget]
    if not within:
        with pytest.raises(CannotQuantize, match="the best forms lose"):
            least_size(parts, budget)
        return
    size, loss = size_and_loss(parts, least_size(parts, budget + 1e-9))
    assert loss <= budget + 1e-6
    assert size <= min(within)


@given(
    sizes=st.lists(st.integers(10**8, 10**11), min_size=2, max_size=6),
    share=st.floats(0, 1),
    losses=st.lists(st.floats(0.001, 1), min_size=6, max_size=6),
)
def test_a_budget_is_held_where_sizes_have_no_common_measure(
    sizes: list[int], share: float, losses: list[float]
) -> None:
    """A budget is held where sizes are rounded up for lack of a common divisor, and the choice is close to the best."""
    parts = [[Choice(size, loss), Choice(2 * size + 1, loss / 100)] for size, loss in zip(sizes, losses, strict=False)]
    budget = int(sum(sizes) * (1 + share))
    size, loss = size_and_loss(parts, least_loss(parts, budget))
    assert size <= budget
    roomy = [lost for taken, lost in everything(parts) if taken <= budget - len(parts) * budget // 50_000]
    assert not roomy or loss <= min(roomy) + 1e-9


def test_a_mixed_choice_beats_a_uniform_one() -> None:
    """A mixed choice loses less than a uniform one of the same size, and is smaller at the same loss."""
    parts = [[Choice(4 * n, 100 / n**2), Choice(8 * n, 1 / n**2), Choice(16 * n, 0.0)] for n in range(1, 101)]
    for index in (0, 1):
        budget, uniform = size_and_loss(parts, [index] * len(parts))
        size, loss = size_and_loss(parts, least_loss(parts, budget))
        assert size <= budget
        assert loss <= uniform * (1 if index == 0 else 0.5)
        assert size_and_loss(parts, least_size(parts, uniform))[0] <= budget
