"""Who comes a second time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

_MOST = 200_000


class SecondTouch:
    """Remembers keys that were offered once, the latest 200,000 of them (some 20 MB)."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def lead(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys have been offered before; all of them have been from now on."""
        known = next((place for place, key in enumerate(keys) if key not in self._seen), len(keys))
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return known
