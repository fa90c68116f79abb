"""Admission on second use: blocks of a one-shot prompt are stored when they are offered again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prefix_store.eviction.access import Access
from prefix_store.tiers.counts import TierCounts

_MAX_KEYS = 200_000


class SecondUseAdmission:
    """Remembers the latest 200,000 keys that were offered (some 20 MB)."""

    def __init__(self, counts: TierCounts) -> None:
        self._counts = counts
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def admitted(self, keys: Sequence[bytes], access: Access) -> int:
        """How many leading keys are to be stored: of a one-shot prompt those offered before. Counts the others."""
        if not access.one_shot:
            return len(keys)
        admitted = self._lead(keys)
        self._counts.rejected["not admitted"] += len(keys) - admitted
        return admitted

    def _lead(self, keys: Sequence[bytes]) -> int:
        """How many leading keys have been offered before. Remembers all of them."""
        known = next((place for place, key in enumerate(keys) if key not in self._seen), len(keys))
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _MAX_KEYS:
            self._seen.popitem(last=False)
        return known
