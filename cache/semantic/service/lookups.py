"""The lookups that run now: work in the background yields to them, and their clients may leave meanwhile."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

_MAX_SECONDS = 0.05


class RunningLookups:
    """Counts running lookups by the key of their request."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._left: set[str] = set()
        self._none_runs = asyncio.Event()
        self._none_runs.set()

    @contextlib.contextmanager
    def running(self, key: str) -> Iterator[None]:
        self._running[key] += 1
        self._none_runs.clear()
        try:
            yield
        finally:
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
                self._left.discard(key)
            if not self._running:
                self._none_runs.set()

    def leave(self, key: str) -> None:
        """The client does not wait for the lookup any more, if it still runs."""
        if key in self._running:
            self._left.add(key)

    def has_left(self, key: str) -> bool:
        return key in self._left

    async def yield_to_lookups(self) -> None:
        """Wait until no lookup runs, for at most 50 ms: under constant load twenty answers a second are learned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MAX_SECONDS):
                await self._none_runs.wait()
