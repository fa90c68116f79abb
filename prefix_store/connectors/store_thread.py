"""A thread with an event loop for the store, beside an engine that has none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

_START_SECONDS = 300.0
_LAST_SECONDS, _STOP_SECONDS = 2.0, 10.0


class StoreThread(Generic[T]):
    """Keeps a context open in an event loop of its own.

    Args:
        opens: makes the context; called in the thread.

    Raises:
        Exception: whatever opening it has raised.
        TimeoutError: it was not open after five minutes.
    """

    def __init__(self, opens: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._opened: Future[T] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(opens)), name="prefix-store", daemon=True)
        self._thread.start()
        self.value = self._opened.result(_START_SECONDS)

    @property
    def is_alive(self) -> bool:
        """Whether work that is begun will end."""
        return self._loop is not None

    def begin(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs work in the loop; its exceptions are logged. Any thread. After the end nothing is run."""
        loop = self._loop
        try:
            if loop is None:
                raise RuntimeError
            loop.call_soon_threadsafe(self._start, work)
        except RuntimeError:  # the loop is closed
            work.close()

    def close(self) -> None:
        """Lets the work that is under way end, for two seconds, then closes the context; waits ten at most."""
        if (loop := self._loop) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("the prefix store did not end within %g s", _STOP_SECONDS)

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(_contained(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: work.close())  # it may have been cancelled before it began

    async def _run(self, opens: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        _use_all_processors()
        try:
            async with opens() as value:
                self._loop = asyncio.get_running_loop()
                self._opened.set_result(value)
                try:
                    await self._end.wait()
                finally:
                    self._loop = None
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=_LAST_SECONDS)
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        except BaseException as error:
            if self._opened.done():
                log.exception("the prefix store has ended; prompts are computed from now on")
            else:
                self._opened.set_exception(error)


def _use_all_processors() -> None:
    """An engine may have pinned its thread, and with it those that it starts, to the processor that computes."""
    with contextlib.suppress(AttributeError, OSError):  # no Linux; not allowed
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


async def _contained(work: Coroutine[Any, Any, Any]) -> None:
    try:
        await work
    except Exception:
        log.exception("work of the prefix store failed")
