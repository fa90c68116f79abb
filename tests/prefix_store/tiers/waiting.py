"""Waiting for what other threads and processes do."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Returns when the condition holds; fails the test if it never does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain until {what}"
        await asyncio.sleep(0.01)
