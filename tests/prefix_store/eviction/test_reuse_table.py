"""The learned policy's tables, against known distributions."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.eviction.age_histogram import AgeHistogram
from prefix_store.eviction.ages import BUCKETS, EDGES, WIDTHS, bucket, buckets
from prefix_store.eviction.reuse_table import ReuseTable, _index


@given(st.floats(0.0, 1e12))
def test_an_age_is_within_its_bucket(age: float) -> None:
    """Ages below a second are in the first bucket and those beyond the last edge in the last one."""
    found = bucket(age)
    assert EDGES[found] <= age * (1 + 1e-9)
    assert age <= EDGES[found + 1] * (1 + 1e-9) or found == BUCKETS - 1


def test_many_ages_are_in_the_buckets_that_each_of_them_is_in() -> None:
    """`buckets` agrees with `bucket` between edges, beyond the last one and below a second."""
    ages = [0.0, 0.5, -1.0, 1e12, *((EDGES[1:] + EDGES[:-1]) / 2)]
    assert buckets(np.array(ages)).tolist() == [bucket(age) for age in ages]


def test_the_index_is_the_best_of_all_times_to_wait() -> None:
    """It equals a sum over all buckets, for hazards of all sizes."""
    draw = np.random.default_rng(1)
    hazards = 10.0 ** draw.uniform(-7, 1, (6, BUCKETS))
    index = _index(hazards)
    for hazard, found in zip(hazards, index, strict=True):
        for age in range(0, BUCKETS, 5):
            alive, reused, held, best = 1.0, 0.0, 0.0, 0.0
            for rate, width in zip(hazard[age:], WIDTHS[age:], strict=True):
                dies = -math.expm1(-rate * width)
                reused += alive * dies
                held += alive * dies / rate
                alive *= 1 - dies
                best = max(best, reused / held)
            assert found[age] == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("rate", [1.0, 0.01, 0.0003])
def test_a_constant_hazard_is_found(rate: float) -> None:
    """For a constant rate of uses the index is that rate at every observed age."""
    draw = random.Random(1)  # noqa: S311  # not a secret
    table, waiting = ReuseTable(2, 2, half_life=1e9), AgeHistogram(4)
    for _ in range(20_000):
        age = draw.expovariate(rate)
        if age < 3 / rate:
            table.reuse(1, age, 1)
        else:
            table.lose(1, 3 / rate, 1)
    index = table.compute(waiting, 0.0)[1]
    for age in (0.1 / rate, 1 / rate):
        assert index[bucket(age)] == pytest.approx(rate, rel=0.15)


def test_a_class_that_comes_back_late_is_worth_its_waiting() -> None:
    """The index looks ahead: just before a certain reuse it is higher than just after the use, and never zero."""
    table, waiting = ReuseTable(1, 2, half_life=1e9), AgeHistogram(2)
    for _ in range(50):
        table.reuse(0, 100.0, 100)
    index = table.compute(waiting, 0.0)[0]
    assert index[bucket(90.0)] > 2 * index[bucket(1.0)] > 0
    assert index[bucket(1.0)] > 1 / 200
    assert index[bucket(10_000.0)] < index[bucket(1.0)]


def test_what_still_waits_counts_as_exposure() -> None:
    """A class whose blocks have waited long without a use has a lower index than an unknown class."""
    table, waiting = ReuseTable(1, 2, half_life=1e9), AgeHistogram(2)
    for _ in range(100):
        waiting.add(0, 0.0, 100)
    index = table.compute(waiting, 5_000.0)
    assert index[0][bucket(100.0)] < 0.8 * index[1][bucket(100.0)]


def test_a_block_that_changes_its_class_counts_in_each_for_its_time_there() -> None:
    """Two classes with the same constant rate both get it, whenever blocks change their class."""
    draw = random.Random(2)  # noqa: S311  # not a secret
    table, waiting = ReuseTable(1, 2, half_life=1e9), AgeHistogram(2)
    for _ in range(20_000):
        changed, age = draw.uniform(20.0, 60.0), draw.expovariate(0.01)
        if age < changed:
            table.reuse(0, age, 1)
        else:
            table.change(0, 1, changed, 1)
            table.reuse(1, age, 1)
    index = table.compute(waiting, 0.0)
    assert index[0][bucket(15.0)] == pytest.approx(0.01, rel=0.15)
    assert index[1][bucket(70.0)] == pytest.approx(0.01, rel=0.15)


def test_a_kind_that_is_not_decided_yet_is_worth_what_its_group_is() -> None:
    """The index of an undecided kind includes the reuses after the decision."""
    index: dict[int | None, float] = {}
    for undecided in (None, 1):
        table, waiting = ReuseTable(1, 2, half_life=1e9, undecided=undecided), AgeHistogram(2)
        for number in range(10_000):
            decided = 20.0 + number % 20
            table.change(1, 0, decided, 1)
            table.reuse(0, decided + 10.0, 1)
        index[undecided] = table.compute(waiting, 0.0)[1][bucket(20.0)]
    assert index[1] > 1.3 * index[None] > 0


def test_what_was_seen_long_ago_fades() -> None:
    """After many half-lives without data the table is the initial one."""
    table, waiting = ReuseTable(1, 1, half_life=1.0), AgeHistogram(1)
    first = table.compute(waiting, 0.0)
    table.lose(0, 10_000.0, 1_000_000)
    assert table.compute(waiting, 0.0)[0][20] < first[0][20] / 10
    for _ in range(60):
        last = table.compute(waiting, 0.0)
    assert np.allclose(last, first)


@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 1e5), st.integers(1, 9)), max_size=60), st.data())
def test_waiting_blocks_are_counted_once_each(arrivals: list[tuple[int, float, int]], data: st.DataObject) -> None:
    """What was added can be removed, after bins were merged and for times in any order."""
    waiting = AgeHistogram(3)
    expected = [0, 0, 0]
    for label, since, blocks in arrivals:
        waiting.add(label, since, blocks)
        expected[label] += blocks
        if data.draw(st.booleans()):
            assert waiting.by_age(1e5).sum(1).tolist() == expected
    for label, since, blocks in arrivals:
        if data.draw(st.booleans()):
            waiting.move(label, 2 - label, since, blocks)
            label = 2 - label
        waiting.remove(label, since, blocks)
    assert not waiting.by_age(1e5).any()


def test_bins_stay_few() -> None:
    """Three days of uses every second make a few hundred bins, with ages accurate to a few per cent."""
    waiting = AgeHistogram(1)
    for second in range(3 * 86_400):
        waiting.add(0, float(second), 1)
        if second % 1_000 == 0:
            waiting.by_age(float(second))
    found = waiting.by_age(3 * 86_400.0)[0]
    assert waiting.bins < 400
    for low, high in ((10, 20), (25, 35), (35, 43)):
        assert found[low:high].sum() == pytest.approx(EDGES[high] - EDGES[low], rel=0.1)
