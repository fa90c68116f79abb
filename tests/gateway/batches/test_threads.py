"""Blocking work in threads, and what a cancellation of it does."""

import asyncio
import threading
from collections.abc import Generator

import pytest

from gateway.batches.threads import in_thread, run_in_slices


async def test_a_cancellation_waits_for_the_function() -> None:
    """However often it is cancelled, the caller goes on only when the function has returned."""
    entered, leave, left = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        leave.wait(10)
        left.set()

    task = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(entered.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.wait([task], timeout=0.01)
    assert not task.done()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left.is_set()


async def test_a_cancellation_ends_a_generator_after_a_slice() -> None:
    """A generator without end is left at one of its steps, and is closed."""
    entered, closed = threading.Event(), threading.Event()

    def steps() -> Generator[None, None, None]:
        try:
            while True:
                entered.set()
                yield
        finally:
            closed.set()

    task = asyncio.create_task(run_in_slices(steps()))
    await asyncio.to_thread(entered.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed.is_set()


async def test_an_error_of_a_step_is_the_callers() -> None:
    """It ends the run, as a whole one does."""

    def steps() -> Generator[None, None, None]:
        yield
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        await run_in_slices(steps())
    await run_in_slices(none for none in [None] * 5)
