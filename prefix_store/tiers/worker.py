"""A thread that works for an event loop, and never touches what its caller has taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from prefix_store.tiers.halt import Halt, Halted

T = TypeVar("T")

_CLOSE_SECONDS = 5.0


class Worker:
    """Runs blocking work, in order where it has one thread."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[Halt], T]) -> T:
        """What the work returns; raises what it raises. Who cancels this has halted the work (see `Halt`)."""
        halt = Halt()
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, halt)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            halt.set()
            future.add_done_callback(_forget)
            raise

    async def close(self) -> None:
        """Takes no more work, and waits for what is under way, unless that hangs."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.to_thread(self._executor.shutdown)
        except TimeoutError:
            return


def _forget(future: asyncio.Future[T]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None and not isinstance(error, Halted):
        raise error  # to the event loop's log: who wanted the result is gone
