"""A tier's interface."""

from typing import Protocol

from cache.entries.entry import Entry


class Store(Protocol):
    """A place for entries. Every implementation passes tests/cache/stores/test_store_contract.py."""

    async def get(self, entry_id: str) -> Entry | None:
        """The entry, or None if this tier has none (expired ones count as none).

        Changes nothing but recency. Raises StoreUnavailable if the tier fails.
        """

    async def put(self, entry: Entry, keep_for: float) -> None:
        """Keep the entry for `keep_for` seconds, in place of an older one. Zero seconds keeps nothing.

        Raises StoreUnavailable when it could not be kept.
        """

    async def delete(self, entry_id: str) -> bool:
        """Removes one entry; False if there was none. Raises StoreUnavailable if the tier fails."""
