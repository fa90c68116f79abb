"""Waiting for what has no event: other processes, servers that are asked over HTTP, logs, plain values."""

import asyncio
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], bool | Awaitable[bool]], within: float = 10.0, every: float = 0.005) -> None:
    """Return once the condition holds. Raises TimeoutError after `within` seconds."""
    async with asyncio.timeout(within):
        while not await _holds(condition):  # noqa: ASYNC110  # see above
            await asyncio.sleep(every)


async def until_steady(value: Callable[[], int], pause: float = 0.3, within: float = 60.0) -> None:
    """Return once a value has not changed for `pause` seconds: no event says that nothing more happens."""
    before: list[int] = []

    def is_steady() -> bool:
        before.append(value())
        return len(before) > 1 and before[-1] == before[-2]

    await until(is_steady, within, pause)


async def _holds(condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    found = condition()
    return found if isinstance(found, bool) else await found
