"""Changes the age of entries, so that no test has to wait."""

import msgspec

from tests.gateway.client import Client


async def grow_old(client: Client, entry_id: str, seconds: float) -> None:
    """Moves the entry's creation that much earlier."""
    cache = client.gateway.cache
    entry = await cache.entry(entry_id)
    assert entry is not None
    await cache.store(msgspec.structs.replace(entry, created=entry.created - seconds))
