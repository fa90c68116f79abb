"""Blocking work outside the event loop, such that a cancellation leaves nothing running on what is being closed."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Generator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SLICE = 0.05


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """As asyncio.to_thread, but a cancellation waits until the function, which should be short, has returned."""
    task = asyncio.create_task(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


async def run_in_slices(steps: Generator[None, None, None]) -> None:
    """Run a generator to its end in a thread, a slice of time after the other: a cancellation waits for one of them."""
    try:
        while await in_thread(_run_slice, steps):
            pass
    finally:
        await in_thread(steps.close)


def _run_slice(steps: Generator[None, None, None]) -> bool:
    """Returns whether the generator may have more steps."""
    end = time.monotonic() + _SLICE
    return any(time.monotonic() >= end for _ in steps)
