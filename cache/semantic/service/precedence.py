"""Who goes first: those who ask, before what is learned from answers."""

import asyncio
import contextlib
from collections.abc import Iterator

_MOST = 0.05


class Precedence:
    """Counts who asks just now, so that work which nobody waits for can give way.

    It gives way for 50 ms at most: where there is always somebody who asks, twenty answers a second are learned.
    """

    def __init__(self) -> None:
        self._asking = 0
        self._nobody_asks = asyncio.Event()
        self._nobody_asks.set()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        self._asking += 1
        self._nobody_asks.clear()
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self._nobody_asks.set()

    async def give_way(self) -> None:
        """Wait until nobody asks, or long enough."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_MOST):
                await self._nobody_asks.wait()
