"""A machine's price, divided among the requests that it computes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.costs.machine import Machine, MachineShare


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=60), st.floats(0.01, 1000))
@settings(max_examples=200, deadline=None)
def test_the_shares_are_the_price_of_the_busy_time(events: list[tuple[float, bool]], price: float) -> None:
    """Whatever begins and ends when, all costs together are the price of the time in which anything ran."""
    clock, busy, shares = Clock(), 0.0, []
    machine = Machine(price, clock)
    running: list[ExitStack] = []
    for passed, begins in events:
        clock.now += passed
        busy += passed if running else 0
        if begins:
            running.append(ExitStack())
            shares.append(running[-1].enter_context(in_use(machine)))
        elif running:
            running.pop(len(running) // 2).close()
    for stack in running:
        stack.close()
    assert sum(share.cost for share in shares) == pytest.approx(busy * price / 3600, rel=1e-9, abs=1e-12)
    assert all(share.cost >= 0 for share in shares)


@contextmanager
def in_use(machine: Machine) -> Iterator[MachineShare]:
    """A request, however it ends."""
    share = machine.begin()
    try:
        yield share
    finally:
        machine.end(share)


def test_requests_at_the_same_time_share_it() -> None:
    """Alone a request pays for all of the time, beside another for half of it."""
    clock = Clock()
    machine = Machine(3600, clock)
    with in_use(machine) as first:
        clock.now += 4
        with in_use(machine) as second:
            clock.now += 2
        clock.now += 1
    assert (first.cost, second.cost) == pytest.approx((6, 1))


def test_a_failed_request_has_its_share() -> None:
    """The machine was busy, however the request ended."""
    clock = Clock()
    machine = Machine(3600, clock)
    with ExitStack() as stack:
        stack.enter_context(suppress(ConnectionError))
        share = stack.enter_context(in_use(machine))
        clock.now += 5
        raise ConnectionError
    assert share.cost == 5


def test_the_price_of_tokens_is_measured_over_ten_minutes() -> None:
    """Tokens and busy seconds of the last ten minutes count, idle time does not."""
    clock = Clock()
    machine = Machine(36, clock)
    assert machine.cost_per_1k_tokens() is None
    for _ in range(2):
        with in_use(machine):
            clock.now += 10
            machine.count(500)
        clock.now += 60
    tokens, busy = machine.throughput()
    assert tokens == 1000
    assert busy == pytest.approx(20)
    assert machine.cost_per_1k_tokens() == pytest.approx(0.2)
    clock.now += 601
    assert machine.throughput() == (0, 0)
