"""Entries that are older than they are, so that no test waits for one to grow old."""

import msgspec

from tests.gateway.client import Client


async def grow_old(client: Client, entry_id: str, seconds: float) -> None:
    """Let the entry have been computed that much earlier."""
    cache = client.gateway.cache
    entry = await cache.entry(entry_id)
    assert entry is not None
    await cache.store(msgspec.structs.replace(entry, created=entry.created - seconds))
