"""What steps take, as it is learnt from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.speculation.step_costs import StepCosts, measure
from tests.backend.tiny_model import fused

PLAIN = {1: 1.0, 8: 2.0, 32: 4.0}
DRAFTED = {2: 1.5, 8: 2.5, 32: 5.0}


def test_sizes_that_were_not_measured_lie_between() -> None:
    """And beyond the largest one on the line through the others."""
    costs = StepCosts(PLAIN, DRAFTED)
    assert costs.plain(20) == pytest.approx(3.0)
    assert costs.drafted(20) == pytest.approx(3.75)
    assert costs.plain(63) == pytest.approx(7.0)
    assert costs.relative(1, np.array([1, 7])) == pytest.approx([1.5, 2.5])


def test_a_slow_minute_favours_no_size() -> None:
    """Steps that all take three times as long are as long relative to each other as before."""
    costs = StepCosts(PLAIN, DRAFTED)
    before = costs.relative(8, np.arange(1, 25))
    for _ in range(200):
        for rows in (1, 8, 32):
            costs.record(rows, 3 * PLAIN[rows], drafted=False)
        for rows in (2, 8, 32):
            costs.record(rows, 3 * DRAFTED[rows], drafted=True)
    assert costs.relative(8, np.arange(1, 25)) == pytest.approx(before, rel=0.02)
    assert costs.plain(8) == pytest.approx(6.0, rel=0.05)


def test_steps_with_drafts_that_take_longer_make_plain_ones_no_longer() -> None:
    """As on a device, where plain steps are replayed and others are launched kernel by kernel."""
    costs = StepCosts(PLAIN, DRAFTED)
    for _ in range(300):
        costs.record(8, 2.0, drafted=False)
        costs.record(8, 6.0, drafted=True)
    assert costs.drafted(8) / costs.plain(8) == pytest.approx(3.0, rel=0.05)


@given(st.lists(st.tuples(st.integers(1, 2500), st.floats(1e-6, 1e3), st.booleans()), max_size=100))
def test_more_rows_never_take_less(steps: list[tuple[int, float, bool]]) -> None:
    """Whatever was recorded, and nothing is negative."""
    costs = StepCosts(PLAIN, DRAFTED)
    for rows, seconds, drafted in steps:
        costs.record(rows, seconds, drafted=drafted)
    for seconds_of in (costs.plain, costs.drafted):
        means = np.array([seconds_of(rows) for rows in range(1, 2100, 7)])
        assert (means > 0).all()
        assert (np.diff(means) >= 0).all()


def test_a_runner_is_measured_in_both_kinds() -> None:
    """Seconds are above 0, and more rows take no less."""
    costs = measure(fused(64))
    assert 0 < costs.plain(1) <= costs.plain(32)
    assert 0 < costs.drafted(2) <= costs.drafted(32)
