"""Threads for an event loop's blocking work, which can be cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from prefix_store.tiers.cancellation import Cancelled, CancelToken

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_SECONDS = 5.0
_NICENESS = 10


class Worker:
    """Runs blocking work, in order if it has one thread.

    Its threads are daemons, unlike an executor's: one that a dead disk blocks must not block the process's end.

    Args:
        is_urgent: whether somebody waits for the work. Threads for other work leave the processors to an engine that
            computes on them.
    """

    def __init__(self, name: str, threads: int = 1, is_urgent: bool = True) -> None:
        self._is_urgent = is_urgent
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._is_closed = False
        self._ends: list[Future[None]] = [Future() for _ in range(threads)]
        for number, end in enumerate(self._ends):
            threading.Thread(target=self._work, args=(end,), name=f"{name}-{number}", daemon=True).start()

    async def run(self, work: Callable[[CancelToken], T], cancel: CancelToken | None = None) -> T:
        """The work's result; raises what it raises. A cancellation cancels the work (see `CancelToken`).

        Args:
            cancel: the caller's token; it is not set when only this piece of work is cancelled.

        Raises:
            Cancelled: `cancel` was set before the work returned, which it may never do.
            RuntimeError: the worker has been closed.
        """
        loop = asyncio.get_running_loop()
        own = CancelToken()
        given_up = loop.create_future()

        def give_up() -> None:
            own.set()
            loop.call_soon_threadsafe(_settle, given_up)

        def begin() -> T:
            with own:
                pass  # work that was cancelled in the queue is not started
            return work(own)

        with cancel.on_cancel(give_up) if cancel is not None else contextlib.nullcontext():
            future = asyncio.wrap_future(self._submit(begin))
            try:
                await asyncio.wait((future, given_up), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                own.set()
                future.add_done_callback(_forget)
                raise
        if future.done():
            return future.result()
        future.add_done_callback(_forget)
        raise Cancelled

    async def close(self) -> None:
        """Takes no more work, cancels what has not begun, and waits for running work, unless it hangs."""
        self._is_closed = True
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                job[0].cancel()
        for _ in self._ends:
            self._jobs.put(None)
        await asyncio.wait([asyncio.wrap_future(end) for end in self._ends], timeout=_CLOSE_SECONDS)

    def _submit(self, work: Callable[[], T]) -> Future[T]:
        if self._is_closed:
            raise RuntimeError("this worker has been closed")
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def _work(self, end: Future[None]) -> None:
        if not self._is_urgent and sys.platform == "linux":  # elsewhere niceness is that of a process
            with contextlib.suppress(OSError):  # a sandbox may forbid it: then it is as urgent as the rest
                os.nice(_NICENESS)
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - it is raised to the caller
                future.set_exception(error)
            del job, future, work  # releases the work's objects before the wait
        end.set_result(None)


def _settle(given_up: asyncio.Future[None]) -> None:
    if not given_up.done():
        given_up.set_result(None)


def _forget(future: asyncio.Future[T]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None and not isinstance(error, Cancelled):
        # Any error that the caller would have handled, such as a peer's failure at the moment of the cancellation.
        log.warning("abandoned work has failed: %s: %s", type(error).__name__, error)
