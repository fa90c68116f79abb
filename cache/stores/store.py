"""The contract of a tier."""

from typing import Protocol

from cache.entries.entry import Entry


class Store(Protocol):
    """One place where entries live. Every implementation passes tests/cache/stores/test_store_contract.py."""

    async def get(self, entry_id: str) -> Entry | None:
        """The entry, or None where this tier has none (expired ones count as none).

        Changes nothing but recency. Raises StoreUnavailable when the tier cannot say.
        """

    async def put(self, entry: Entry, keep_for: float) -> None:
        """Keep the entry for `keep_for` seconds, in place of an older one. Zero seconds keeps nothing.

        Raises StoreUnavailable when it could not be kept.
        """

    async def delete(self, entry_id: str) -> bool:
        """Forget one entry; False when there was none. Raises StoreUnavailable when the tier cannot say."""
