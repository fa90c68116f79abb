"""How many requests an upstream is sent at the same time, and the queue of those that wait."""

import asyncio
import heapq
from itertools import count

_Waiter = tuple[int, int, asyncio.Future[None]]


class QueueFull(Exception):
    """As many requests are waiting as may wait."""


class Slots:
    """At most `limit` requests have a slot at the same time; None is without a limit.

    Up to `max_waiting` others wait: lower priorities come first, equal ones in the order of their arrival.
    """

    def __init__(self, limit: int | None, max_waiting: int) -> None:
        self.limit = limit
        self.taken = 0
        self._max_waiting = max_waiting
        self._queue: list[_Waiter] = []
        self._numbers = count()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def is_full(self) -> bool:
        """Whether the next request would wait."""
        return self.limit is not None and self.taken >= self.limit

    async def take(self, priority: int, deadline: float) -> None:
        """Take a slot, which `release` gives back; `deadline` is a time of the event loop.

        Raises QueueFull at once, and TimeoutError at the deadline. Whoever is cancelled has no slot.
        """
        if not self.is_full:
            self.taken += 1
            return
        if len(self._queue) >= self._max_waiting:
            raise QueueFull
        granted = asyncio.get_running_loop().create_future()
        waiter = (priority, next(self._numbers), granted)
        heapq.heappush(self._queue, waiter)
        try:
            async with asyncio.timeout_at(deadline):
                await granted
        except BaseException:
            if not granted.cancelled():
                self.release()  # it was given a slot in the same turn
            elif waiter in self._queue:
                self._queue.remove(waiter)
                heapq.heapify(self._queue)
            raise

    def release(self) -> None:
        """Give a slot back; the first in the queue takes it over."""
        while self._queue:
            _, _, granted = heapq.heappop(self._queue)
            if not granted.cancelled():  # else whoever waited is about to leave
                granted.set_result(None)
                return
        self.taken -= 1
