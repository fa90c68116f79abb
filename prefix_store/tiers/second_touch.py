"""Who comes a second time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from prefix_store.eviction.access import Access
from prefix_store.tiers.counts import TierCounts

_MOST = 200_000


class SecondTouch:
    """Remembers keys that were offered once, the latest 200,000 of them (some 20 MB)."""

    def __init__(self, counts: TierCounts, most: int = _MOST) -> None:
        self._counts = counts
        self._most = most
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def admitted(self, keys: Sequence[bytes], access: Access) -> int:
        """How many of the first keys are to be kept: of a one-shot, what has been offered before. Counts the others."""
        if not access.one_shot:
            return len(keys)
        admitted = self._lead(keys)
        self._counts.dropped["not admitted"] += len(keys) - admitted
        return admitted

    def _lead(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys have been offered before; all of them have been from now on."""
        known = next((place for place, key in enumerate(keys) if key not in self._seen), len(keys))
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return known
