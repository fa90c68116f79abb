"""A thread that works for an event loop, and never touches what its caller has taken back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prefix_store.tiers.halt import Halt, Halted

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_SECONDS = 5.0


class Worker:
    """Runs blocking work, in order where it has one thread."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[Halt], T], halt: Halt | None = None) -> T:
        """What the work returns; raises what it raises. Who cancels this has halted the work (see `Halt`).

        Args:
            halt: the caller's. It stays as it is where only this piece of work is given up.

        Raises:
            Halted: `halt` has been set, and the work has not returned, which it need not ever do.
        """
        loop = asyncio.get_running_loop()
        own = Halt()
        given_up = loop.create_future()

        def give_up() -> None:
            own.set()
            loop.call_soon_threadsafe(_settle, given_up)

        def begin() -> T:
            with own:
                pass  # what was given up while it waited for the thread is not begun
            return work(own)

        with halt.followed_by(give_up) if halt is not None else contextlib.nullcontext():
            future = loop.run_in_executor(self._executor, begin)
            try:
                await asyncio.wait((future, given_up), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                own.set()
                future.add_done_callback(_forget)
                raise
        if future.done():
            return future.result()
        future.add_done_callback(_forget)
        raise Halted

    async def close(self) -> None:
        """Takes no more work, and waits for what is under way, unless that hangs."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.to_thread(self._executor.shutdown)
        except TimeoutError:
            return


def _settle(given_up: asyncio.Future[None]) -> None:
    if not given_up.done():
        given_up.set_result(None)


def _forget(future: asyncio.Future[T]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None and not isinstance(error, Halted):
        # It may be any that who waited would have handled, as when a peer fails in the moment in which it is given up.
        log.warning("work that nobody waits for any more has failed: %s: %s", type(error).__name__, error)
