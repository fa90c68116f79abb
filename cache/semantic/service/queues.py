"""Background work: its bounded queue, and its priority below lookups."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Generic, TypeVar

_MAX_SECONDS = 0.05


class LookupPriority:
    """Counts running lookups, so that background work can yield to them.

    It yields for at most 50 ms: under constant load twenty answers a second are learned.
    """

    def __init__(self) -> None:
        self._lookups = 0
        self._no_lookup = asyncio.Event()
        self._no_lookup.set()

    @contextlib.contextmanager
    def looking_up(self) -> Iterator[None]:
        self._lookups += 1
        self._no_lookup.clear()
        try:
            yield
        finally:
            self._lookups -= 1
            if not self._lookups:
                self._no_lookup.set()

    async def yield_to_lookups(self) -> None:
        """Wait until no lookup runs, for at most 50 ms."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_SECONDS):
                await self._no_lookup.wait()


T = TypeVar("T")


class WorkQueue(Generic[T]):
    """Waiting work, oldest first. At most `most` items wait: then the newest replaces the oldest."""

    def __init__(self, most: int) -> None:
        self._queue: asyncio.Queue[T] = asyncio.Queue(most)
        self._unfinished = 0

    def __len__(self) -> int:
        """How many wait or are being worked on."""
        return self._unfinished

    def add(self, item: T) -> bool:
        """False if it replaced another one."""
        has_room = not self._queue.full()
        if not has_room:
            self._queue.get_nowait()
            self._finished()
        self._queue.put_nowait(item)
        self._unfinished += 1
        return has_room

    async def work(self, do: Callable[[T], Awaitable[None]]) -> None:
        """Processes items forever; several tasks may."""
        while True:
            item = await self._queue.get()
            try:
                await do(item)
            finally:
                self._finished()

    async def idle(self) -> None:
        """Wait until nothing is left to do."""
        await self._queue.join()

    def _finished(self) -> None:
        self._unfinished -= 1
        self._queue.task_done()
