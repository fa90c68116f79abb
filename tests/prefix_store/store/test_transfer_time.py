"""Transfer times learned from measurements."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.store.transfer_time import TransferTime

_BLOCKS = st.integers(1, 5_000)
_MEASURED = st.lists(st.tuples(_BLOCKS, st.floats(1e-6, 60.0)), min_size=1, max_size=60)


def learned(measured: list[tuple[int, float]]) -> TransferTime:
    time = TransferTime()
    for now, (blocks, seconds) in enumerate(measured):
        time.note(blocks, seconds, float(now))
    return time


def test_of_a_place_that_gave_nothing_nothing_is_known() -> None:
    """It has no estimate, and is stale."""
    time = TransferTime()

    assert time.estimate(1) is None
    assert time.is_stale(0.0)


@given(_MEASURED, _BLOCKS, _BLOCKS)
def test_an_estimate_is_never_negative_and_never_less_for_more_blocks(
    measured: list[tuple[int, float]], fewer: int, more: int
) -> None:
    """This holds for any measurements."""
    time = learned(measured)
    fewer, more = sorted((fewer, more))
    less, longer = time.estimate(fewer), time.estimate(more)

    assert less is not None
    assert longer is not None
    assert 0.0 <= less <= longer


@given(_MEASURED, _BLOCKS)
def test_an_estimate_lies_within_what_was_measured(measured: list[tuple[int, float]], blocks: int) -> None:
    """An estimate is never below the fastest measurement, per block or per transfer."""
    estimate = learned(measured).estimate(blocks)
    best = min(min(seconds, seconds * blocks / count) for count, seconds in measured)

    assert estimate is not None
    assert estimate >= best * (1 - 1e-6)


@given(st.floats(0.0, 0.1), st.floats(1e-5, 0.01), st.lists(st.integers(1, 200), min_size=12, max_size=40, unique=True))
def test_a_fixed_part_is_told_from_a_part_for_each_block(fixed: float, each: float, counts: list[int]) -> None:
    """The fixed time and the time per block are estimated separately."""
    time = learned([(count, fixed + each * count) for count in counts])

    assert time.estimate(1_000) == pytest.approx(fixed + 1_000 * each, rel=1e-3, abs=1e-6)


@given(_BLOCKS, st.floats(1e-5, 0.01), st.floats(3.0, 1_000.0), st.integers(0, 500))
def test_ten_transfers_show_that_a_place_has_become_slow(blocks: int, each: float, times: float, before: int) -> None:
    """The estimate is mostly the new time then, for faster places, too."""
    fast, slow = blocks * each, blocks * each * times
    time = learned([(blocks, fast)] * before + [(blocks, slow)] * 10)
    estimate = time.estimate(blocks)

    assert estimate is not None
    assert estimate >= slow / 2
    for now in range(100):
        time.note(blocks, fast, 1_000.0 + now)
    assert time.estimate(blocks) == pytest.approx(fast, rel=0.1)


def test_one_transfer_says_little_and_one_that_was_ended_enough() -> None:
    """The first one may include connecting; three measurements suffice, or one missed deadline."""
    time = learned([(10, 1.0)] * 2)
    assert not time.is_known
    time.note(10, 1.0, 3.0)
    assert time.is_known
    late = TransferTime()
    late.note_late(10, 1.0, 0.0)
    assert late.is_known
    assert late.estimate(10) == 1.0


def test_a_place_that_was_not_measured_for_a_while_may_have_changed() -> None:
    """A measurement is stale after 20 seconds, until the next one."""
    time = learned([(10, 1.0)])

    assert not time.is_stale(20.0)
    assert time.is_stale(20.1)
    time.note(10, 1.0, 20.1)
    assert not time.is_stale(40.0)
