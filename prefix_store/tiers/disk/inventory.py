"""What a folder holds, as far as the event loop knows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prefix_store.tiers.disk.listing import Listed


class _Change(NamedTuple):
    at: float
    key: bytes
    is_here: bool


class Inventory:
    """The last listing, and what this process has done in the folder since that was begun. One event loop uses it.

    What other processes have done since is not in it.
    """

    def __init__(self) -> None:
        self.is_listed = asyncio.Event()
        """Set when the folder has been looked through once."""
        self._keys: dict[bytes, None] = {}
        self._changes: deque[_Change] = deque()
        self._cleared_at = float("-inf")

    def __len__(self) -> int:
        """Blocks."""
        return len(self._keys)

    def keys(self) -> Sequence[bytes]:
        """All stored keys, parents before children."""
        return tuple(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        """Blocks are here now; parents come before children."""
        for key in keys:
            if key not in self._keys:
                self._apply(_Change(time.monotonic(), key, True))

    def remove(self, keys: Iterable[bytes]) -> None:
        """Blocks have gone."""
        for key in keys:
            self._apply(_Change(time.monotonic(), key, False))

    def clear(self) -> None:
        """Everything has gone."""
        self._cleared_at = time.monotonic()
        self._keys = {}
        self._changes.clear()

    def take(self, listed: Listed) -> None:
        """Knows what has been listed from now on."""
        while self._changes and self._changes[0].at < listed.began:
            self._changes.popleft()
        self._keys = listed.keys if listed.began >= self._cleared_at else {}
        changes, self._changes = self._changes, deque()
        for change in changes:
            self._apply(change)
        self.is_listed.set()

    def _apply(self, change: _Change) -> None:
        self._changes.append(change)
        if change.is_here:
            self._keys[change.key] = None
        else:
            self._keys.pop(change.key, None)
