"""The breaker: one failure, no calls; a probe, calls again."""

import asyncio
import logging
import time

import pytest

from cache.errors import StoreUnavailable
from cache.stores.breaker import Breaker
from tests.waiting import until

DEADLINE = 0.05


class Tier:
    """Something that answers, or hangs, or refuses."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.well = asyncio.Event()
        self.well.set()
        self.error: Exception | None = None
        self.calls = 0
        self.probes = 0

    async def ask(self) -> str:
        self.calls += 1
        self.asked.set()
        await self.well.wait()
        if self.error:
            raise self.error
        return "answer"

    async def probe(self) -> None:
        self.probes += 1
        await self.well.wait()
        if self.error:
            raise self.error


def breaker_of(tier: Tier) -> Breaker:
    return Breaker("tier", tier.probe, (ConnectionError,), DEADLINE)


async def test_a_call_to_an_available_tier_returns_its_result() -> None:
    """A closed breaker passes the result of a call through."""
    tier = Tier()
    breaker = breaker_of(tier)
    assert await breaker.call(tier.ask, DEADLINE) == "answer"
    assert not breaker.is_open


async def test_a_frozen_tier_costs_one_deadline_and_then_nothing() -> None:
    """Calls in flight to a frozen tier fail at their deadline, and later calls fail without being made."""
    tier = Tier()
    breaker = breaker_of(tier)
    tier.well.clear()
    begun = time.monotonic()
    outcomes = await asyncio.gather(*(breaker.call(tier.ask, DEADLINE) for _ in range(10)), return_exceptions=True)
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert DEADLINE * 0.9 <= time.monotonic() - begun < DEADLINE * 10
    assert tier.calls == 10
    assert breaker.times_opened == 1
    with pytest.raises(StoreUnavailable, match="tier is unavailable"):
        await breaker.call(tier.ask, DEADLINE)
    assert tier.calls == 10


async def test_a_blocked_event_loop_opens_the_breaker_only_at_the_third_time() -> None:
    """A deadline missed because the event loop was blocked opens the breaker only at the third time in a row."""
    tier = Tier()
    breaker = breaker_of(tier)
    tier.well.clear()
    outcomes = []
    for _ in range(3):
        tier.asked.clear()
        call = asyncio.create_task(breaker.call(tier.ask, DEADLINE))
        async with asyncio.timeout(10):
            await tier.asked.wait()
        held_up_until = time.monotonic() + 3 * DEADLINE
        while time.monotonic() < held_up_until:
            pass
        with pytest.raises(StoreUnavailable):
            await call
        outcomes.append(breaker.is_open)
    assert outcomes == [False, False, True]


async def test_only_the_probe_closes_the_breaker() -> None:
    """The probe alone calls a tier while its breaker is open."""
    tier = Tier()
    breaker = breaker_of(tier)
    tier.error = ConnectionError("gone")
    watcher = asyncio.create_task(breaker.watch())
    with pytest.raises(StoreUnavailable, match="gone"):
        await breaker.call(tier.ask, DEADLINE)
    while tier.probes < 2:
        await asyncio.sleep(0.01)
        with pytest.raises(StoreUnavailable):
            await breaker.call(tier.ask, DEADLINE)
    assert tier.calls == 1
    tier.error = None
    async with asyncio.timeout(5):
        await breaker.wait_closed()
    assert await breaker.call(tier.ask, DEADLINE) == "answer"
    watcher.cancel()


async def test_the_watch_outlives_many_outages() -> None:
    """The watch closes the breaker after each of several outages."""
    tier = Tier()
    breaker = breaker_of(tier)
    watcher = asyncio.create_task(breaker.watch())
    for outage in range(1, 4):
        tier.well.clear()
        with pytest.raises(StoreUnavailable):
            await breaker.call(tier.ask, DEADLINE)
        assert breaker.times_opened == outage
        tier.well.set()
        async with asyncio.timeout(5):
            await breaker.wait_closed()
    assert not watcher.done()
    watcher.cancel()


async def test_a_fault_of_the_operation_is_no_outage() -> None:
    """An exception that is not listed as a failure passes through and does not open the breaker."""
    tier = Tier()
    breaker = breaker_of(tier)
    tier.error = KeyError("bug")
    with pytest.raises(KeyError):
        await breaker.call(tier.ask, DEADLINE)
    assert not breaker.is_open


async def test_a_cancelled_call_is_no_outage() -> None:
    """Cancelling a call raises CancelledError and does not open the breaker."""
    tier = Tier()
    breaker = breaker_of(tier)
    tier.well.clear()
    call = asyncio.create_task(breaker.call(tier.ask, 5))
    await tier.asked.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not breaker.is_open


async def test_an_outage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An outage logs one line when it begins and one when it ends, whatever the number of failed calls."""
    tier = Tier()
    breaker = breaker_of(tier)
    tier.well.clear()
    with caplog.at_level(logging.INFO, "cache"):
        await asyncio.gather(*(breaker.call(tier.ask, 0.01) for _ in range(20)), return_exceptions=True)
        tier.well.set()
        watcher = asyncio.create_task(breaker.watch())
        async with asyncio.timeout(5):
            await breaker.wait_closed()
        watcher.cancel()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["tier is unavailable (no answer in time); going on without it", "tier is available again"]


async def test_a_blocking_call_opens_the_breaker_only_at_the_third_time() -> None:
    """A call that itself blocks the event loop opens the breaker only at the third time in a row."""
    breaker = Breaker("tier", probe=Tier().probe, failures=(), probe_deadline=1.0)

    async def held_up() -> None:
        time.sleep(0.1)  # noqa: ASYNC251  # holding up the loop is the point
        await asyncio.Event().wait()

    for opened in (False, False, True):
        with pytest.raises(StoreUnavailable):
            await breaker.call(held_up, deadline=0.02)
        assert breaker.is_open is opened


async def test_frequent_outages_are_logged_once_per_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage within the log interval of another is logged only if it lasts until the interval ends."""
    tier = Tier()
    breaker = breaker_of(tier)
    caplog.set_level(logging.WARNING)
    for _ in range(5):
        breaker.trip(ConnectionError("gone"))
        assert await breaker.try_again()
    assert [record.message for record in caplog.records] == [
        "tier is unavailable (gone); going on without it",
        "tier is available again",
    ]
    breaker.trip(ConnectionError("gone for good"))
    # The interval is no setting, and too long for a test.
    monkeypatch.setattr("cache.stores.breaker._LOG_INTERVAL", 0.0)
    tier.error = ConnectionError("gone")
    watching = asyncio.create_task(breaker.watch())
    await until(lambda: "gone for good" in caplog.text, within=10)
    watching.cancel()
