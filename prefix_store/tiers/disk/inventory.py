"""The blocks in a folder: found by listing it in small steps, and kept as an inventory for the event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.folder import Folder


class _Change(NamedTuple):
    at: float
    key: bytes
    is_here: bool


class Inventory:
    """The last listing and this process's own changes since it began. One event loop uses it.

    Changes of other processes show with the next listing.
    """

    def __init__(self) -> None:
        self.is_listed = asyncio.Event()
        """Set after the first listing."""
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
        """Add blocks; parents come before children."""
        for key in keys:
            if key not in self._keys:
                self._apply(_Change(time.monotonic(), key, True))

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove blocks."""
        for key in keys:
            self._apply(_Change(time.monotonic(), key, False))

    def clear(self) -> None:
        """Remove all blocks."""
        self._cleared_at = time.monotonic()
        self._keys = {}
        self._changes.clear()

    def take(self, listed: ScanResult) -> None:
        """Replace the contents by a new listing."""
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


_BLOCKS_AT_ONCE = 500
_YOUNG_SECONDS = 2.0


class ScanResult(NamedTuple):
    """Stored keys of all blocks that can be reached, parents before children, as it was at `began` or later."""

    began: float
    """Monotonic seconds."""
    keys: dict[bytes, None]


@dataclass(slots=True)
class _Part:
    """A subfolder, and its modification time when it was read; -1: it may have changed since."""

    changed: int = -1
    blocks: dict[BlockName, int] = field(default_factory=dict)


class Scan:
    """Lists a folder repeatedly; an unchanged subfolder is not read again. One thread uses it.

    Files of another size than `frame_bytes` have another format, and are left out.
    """

    def __init__(self, folder: Folder, frame_bytes: int) -> None:
        self._folder = folder
        self._frame_bytes = frame_bytes
        self._parts: dict[str, _Part] = {}

    def look(self) -> Iterator[ScanResult | None]:
        """The steps of one listing, of about a millisecond each; the last yields the result. Each may raise OSError."""
        began = time.monotonic()
        blocks = self._folder.path / "blocks"
        names = os.listdir(blocks)
        for gone in self._parts.keys() - set(names):
            del self._parts[gone]
        for name in names:
            self._read(name)
            yield None
        keys: dict[bytes, None] = {}
        for count, _ in enumerate(self._place(keys), 1):
            if not count % _BLOCKS_AT_ONCE:
                yield None
        yield ScanResult(began, keys)

    def _read(self, name: str) -> None:
        path = self._folder.path / "blocks" / name
        part = self._parts.setdefault(name, _Part())
        try:
            changed = path.stat().st_mtime_ns
            if changed == part.changed:
                return
            # File times are coarse: a second change within one tick would not be noticed.
            is_young = time.time() - changed / 1e9 < _YOUNG_SECONDS
            part.blocks = self._folder.blocks_in(name, known=part.blocks)
            part.changed = -1 if is_young else changed
        except (FileNotFoundError, NotADirectoryError):
            self._parts.pop(name, None)

    def _place(self, placed: dict[bytes, None]) -> Iterator[None]:
        """Adds the blocks whose parents are stored, each after its parent."""
        found: dict[bytes, BlockName] = {}
        for part in self._parts.values():
            for name, size in part.blocks.items():
                if size == self._frame_bytes:
                    found[name.key] = name
                yield
        for name in found.values():
            chain: list[BlockName] = []
            above: BlockName | None = name
            while above is not None and above.key not in placed and len(chain) < len(found):
                chain.append(above)
                above = None if above.is_first else found.get(above.parent)
            if chain and (chain[-1].is_first or chain[-1].parent in placed):
                placed.update((reached.key, None) for reached in reversed(chain))
            yield
