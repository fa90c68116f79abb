"""Entries for tests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from cache.entries.entry import Entry


def entry(entry_id: str = "public.aa", **fields: Any) -> Entry:
    """A whole entry; `fields` replace what matters to the test."""
    values: dict[str, Any] = {
        "id": entry_id,
        "proof": b"p" * 16,
        "family": "chat.completions",
        "model": "m",
        "body": b'{"choices":[]}',
        "created": time.time(),
        "fresh_for": 60.0,
        "generation": "0.0.0",
        "has_usage": True,
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "seconds": 0.25,
    }
    return Entry(**{**values, **fields})


async def until(condition: Callable[[], Awaitable[bool]], within: float = 5.0, every: float = 0.005) -> None:
    """Return once the condition holds; TimeoutError after `within` seconds."""
    async with asyncio.timeout(within):
        while not await condition():  # noqa: ASYNC110 (what is waited for happens in another process)
            await asyncio.sleep(every)
