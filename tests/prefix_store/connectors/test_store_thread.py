"""A thread with an event loop: what it opens, what it runs, and how it ends."""

import asyncio
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefix_store.connectors import store_thread
from prefix_store.connectors.store_thread import StoreThread
from tests.prefix_store.connectors.paged_engine.faults import wait_until


class Opened:
    """A context that notes its end."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()
        self.may_close = threading.Event()
        self.may_close.set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        try:
            yield "value"
        finally:
            await asyncio.to_thread(self.may_close.wait, 20)
            self.is_closed.set()


def test_work_runs_in_the_thread_and_the_context_is_closed() -> None:
    """What has begun before the end ends before it."""
    opened, ran, go_on = Opened(), threading.Event(), threading.Event()
    thread = StoreThread(opened.open)
    assert thread.value == "value"
    assert thread.is_alive

    async def work() -> None:
        await asyncio.to_thread(go_on.wait, 10)
        assert not opened.is_closed.is_set()
        ran.set()

    thread.begin(work())
    go_on.set()
    thread.close()
    assert ran.is_set()
    assert opened.is_closed.is_set()
    assert not thread.is_alive


def test_an_error_at_the_start_is_raised() -> None:
    """As it is: the engine does not start."""

    @asynccontextmanager
    async def open_nothing() -> AsyncIterator[None]:
        raise ValueError("disk: there is none")
        yield

    with pytest.raises(ValueError, match="disk: there is none"):
        StoreThread(open_nothing)


def test_a_start_that_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not wait for ever."""
    monkeypatch.setattr(store_thread, "_START_SECONDS", 0.05)
    go_on = threading.Event()

    @asynccontextmanager
    async def open_late() -> AsyncIterator[None]:
        await asyncio.to_thread(go_on.wait, 10)
        yield

    with pytest.raises(TimeoutError):
        StoreThread(open_late)
    go_on.set()


def test_work_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The thread goes on."""
    thread, ran = StoreThread(Opened().open), threading.Event()

    async def fail() -> None:
        raise OSError("no space")

    async def work() -> None:
        ran.set()

    thread.begin(fail())
    thread.begin(work())
    assert ran.wait(10)
    thread.close()
    assert [record.getMessage() for record in caplog.records] == ["work of the prefix store failed"]


def test_work_that_hangs_does_not_keep_it_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is cancelled after a while."""
    monkeypatch.setattr(store_thread, "_LAST_SECONDS", 0.05)
    opened, is_cancelled = Opened(), threading.Event()
    thread = StoreThread(opened.open)

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    thread.begin(hang())
    began = time.monotonic()
    thread.close()
    assert time.monotonic() - began < 5.0
    assert is_cancelled.is_set()
    assert opened.is_closed.is_set()


def test_a_thread_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The engine ends without it."""
    monkeypatch.setattr(store_thread, "_STOP_SECONDS", 0.05)
    opened = Opened()
    opened.may_close.clear()
    thread = StoreThread(opened.open)
    thread.close()
    assert "did not end within" in caplog.text
    opened.may_close.set()
    assert opened.is_closed.wait(10)


def test_after_the_end_nothing_runs() -> None:
    """Work is closed, and closing again does nothing."""
    thread, ran = StoreThread(Opened().open), threading.Event()
    thread.close()

    async def work() -> None:
        ran.set()

    late = work()
    thread.begin(late)
    thread.close()
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    assert not ran.is_set()


def test_a_loop_that_ends_by_itself_is_not_alive_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    """Also while what it had open is closed, which may take long; it is logged."""
    opened = Opened()
    opened.may_close.clear()
    thread = StoreThread(opened.open)

    async def end() -> None:
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    thread.begin(end())
    try:
        wait_until(lambda: not thread.is_alive)
        assert not opened.is_closed.is_set()
    finally:
        opened.may_close.set()
    assert opened.is_closed.wait(10)
    wait_until(lambda: bool(caplog.records))
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    thread.close()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_it_is_not_pinned_with_the_engine() -> None:
    """Engines pin the thread that starts it to one processor: the store would take turns with what computes there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        thread = StoreThread(Opened().open)
    finally:
        os.sched_setaffinity(0, before)
    found: queue.SimpleQueue[set[int]] = queue.SimpleQueue()

    async def work() -> None:
        found.put(os.sched_getaffinity(0))

    thread.begin(work())
    assert found.get(timeout=10) == before
    thread.close()
