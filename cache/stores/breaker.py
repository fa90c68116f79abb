"""A deadline for every call to a tier, and no calls while the tier is known to be down."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from cache.errors import CacheError, StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
_MAX_LATE_CALLS = 2
# Seconds between log messages about an unstable tier.
_LOG_INTERVAL = 10.0


class Breaker:
    """Opens at the first failure; closes when a probe, never a request, succeeds.

    If a tier freezes, the requests in flight wait one deadline, and later ones do not wait.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], Awaitable[object]],
        failures: tuple[type[Exception], ...],
        probe_deadline: float,
    ) -> None:
        self._name = name
        self._probe = probe
        self._failures: tuple[type[Exception], ...] = (TimeoutError, OSError, *failures)
        self._probe_failures: tuple[type[Exception], ...] = (CacheError, *self._failures)
        self._probe_deadline = probe_deadline
        self._opened = asyncio.Event()
        self._closed = asyncio.Event()
        self._closed.set()
        self.times_opened = 0
        self._spoken = -_LOG_INTERVAL
        self._is_silent = False
        self._reason = ""
        self._times_held_up = 0

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    async def call(self, operation: Callable[[], Awaitable[T]], deadline: float) -> T:
        """The operation's result within `deadline` seconds.

        Raises StoreUnavailable when the breaker is open, when the operation fails, or when time is up.
        """
        if self.is_open:
            raise StoreUnavailable(f"{self._name} is unavailable")
        due = asyncio.get_running_loop().time() + deadline
        try:
            async with asyncio.timeout_at(due):
                result = await operation()
        except self._failures as error:
            if not self._loop_was_late(error, due, deadline):
                self.trip(error)
            raise StoreUnavailable(f"{self._name}: {_reason(error)}") from error
        self._times_held_up = 0
        return result

    def _loop_was_late(self, error: Exception, due: float, deadline: float) -> bool:
        """Whether this process, not the tier, is the likely cause: it noticed the end of the deadline very late.

        The third of these in a row counts against the tier.
        """
        if isinstance(error, TimeoutError) and asyncio.get_running_loop().time() - due > deadline:
            self._times_held_up += 1
        else:
            self._times_held_up = 0
        return 0 < self._times_held_up <= _MAX_LATE_CALLS

    def trip(self, error: Exception) -> None:
        if not self.is_open:
            self.times_opened += 1
            self._opened.set()
            self._closed.clear()
            self._reason = _reason(error)
            self._is_silent = True
            self._log_recovery()

    def _log_recovery(self) -> None:
        """Logs that it is open, unless it did so recently."""
        now = time.monotonic()
        if self._is_silent and now - self._spoken >= _LOG_INTERVAL:
            self._is_silent, self._spoken = False, now
            log.warning("%s is unavailable (%s); going on without it", self._name, self._reason)

    async def wait_opened(self) -> None:
        await self._opened.wait()

    async def wait_closed(self) -> None:
        await self._closed.wait()

    async def watch(self) -> None:
        """Probe while open; runs for as long as the tier is in use."""
        while True:
            await self._opened.wait()
            pause = _FIRST_PAUSE
            while not await self.try_again():
                self._log_recovery()
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Runs `watch` meanwhile, for probes that raise only what is expected of them."""
        watching = asyncio.create_task(self.watch())  # a TaskGroup would wrap what the caller raises
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait([watching])

    async def try_again(self) -> bool:
        """Probes once; True, and closed, if that succeeds."""
        try:
            async with asyncio.timeout(self._probe_deadline):
                await self._probe()
        except self._probe_failures:
            return False
        if self.is_open:
            self._opened.clear()
            self._closed.set()
            if not self._is_silent:
                log.warning("%s is available again", self._name)
        return True


def _reason(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
