"""Blocks whose parent is unknown, and how long the evictor waits for it."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from prefix_store.tiers.disk.block_name import BlockName

# Less than a writer waits: orphans are charged to the space that writers may use.
ORPHAN_SECONDS = 1.0
# A parent that was evicted must have been written again, which is known soon.
_PARENT_REMOVED_SECONDS = 0.2
_MAX_REMOVED = 10_000


class Orphan(NamedTuple):
    """A block whose parent is unknown, its size in bytes, and until when it may wait (monotonic seconds)."""

    name: BlockName
    size: int
    until: float
    journal: str
    """The journal that reported it; empty if a scan of the folder found it."""


class Orphans:
    """A parent may be in a journal that is read after its child's, or may be evicted while the child is written."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Orphan] = {}
        # The blocks evicted last: their children have no parent, as when a policy evicts a chain that is being written.
        self._removed: OrderedDict[bytes, BlockName] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def add(self, name: BlockName, size: int, journal: str = "") -> None:
        """Adds a block, unless it is waiting already."""
        patience = _PARENT_REMOVED_SECONDS if name.parent in self._removed else ORPHAN_SECONDS
        self._waiting.setdefault(name.key, Orphan(name, size, time.monotonic() + patience, journal))

    def note_removed(self, names: Iterable[BlockName]) -> None:
        """These blocks have been removed; their children stay orphans unless they are written again."""
        self._removed.update((name.key, name) for name in names)
        while len(self._removed) > _MAX_REMOVED:
            self._removed.popitem(last=False)

    def removed_parent(self, name: BlockName) -> BlockName | None:
        """The parent of this block, if it was removed lately."""
        return self._removed.get(name.parent)

    def forget(self, known: Collection[bytes]) -> None:
        """Drops orphans that are known by now."""
        for key in self._waiting.keys() & known:
            del self._waiting[key]

    def pop_ready(self, has_its_parent: Callable[[BlockName], bool]) -> Iterable[Orphan]:
        """Removes and yields, one after the other, those whose parents are known by then."""
        for key, orphan in list(self._waiting.items()):
            if has_its_parent(orphan.name):
                del self._waiting[key]
                yield orphan

    def expire(self) -> list[Orphan]:
        """Removes and returns those whose time is up."""
        now = time.monotonic()
        given_up = [orphan for orphan in self._waiting.values() if now > orphan.until]
        for orphan in given_up:
            del self._waiting[orphan.name.key]
        return given_up

    def bytes_by_journal(self) -> Counter[str]:
        """Bytes of orphans by journal; under the empty name those that a scan found."""
        sizes = Counter[str]()
        for orphan in self._waiting.values():
            sizes[orphan.journal] += orphan.size
        return sizes
