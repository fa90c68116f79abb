"""Blocks in a folder that no chain leads to, and how long the keeper waits for their parents."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from prefix_store.tiers.disk.block_name import BlockName

# Less than the patience of who writes, for what waits takes of the room that there is ahead.
ORPHAN_SECONDS = 1.0
# Where the parent has been removed, it must have been written again, and that is known a turn or two later.
_BEREAVED_SECONDS = 0.2
_MOST_REMOVED = 10_000


class Orphan(NamedTuple):
    """A block whose parent is not in the books, its size in bytes, and until when it may wait (monotonic seconds)."""

    name: BlockName
    size: int
    until: float
    journal: str
    """Which told of it; empty where the folder did."""


class Orphans:
    """A parent may be told of in a journal that is read after its child's; or it went while the child was written."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Orphan] = {}
        # What went last: what follows it, as where a policy turns a chain away that is being written, has no parent.
        self._removed: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._waiting

    def add(self, name: BlockName, size: int, journal: str = "") -> None:
        """Has a block wait, unless it does so already."""
        patience = _BEREAVED_SECONDS if name.parent in self._removed else ORPHAN_SECONDS
        self._waiting.setdefault(name.key, Orphan(name, size, time.monotonic() + patience, journal))

    def note_removed(self, keys: Iterable[bytes]) -> None:
        """These blocks have gone; nobody will place what follows them, unless they come back."""
        self._removed.update(dict.fromkeys(keys))
        while len(self._removed) > _MOST_REMOVED:
            self._removed.popitem(last=False)

    def forget(self, known: Collection[bytes]) -> None:
        """Those that are in the books wait no longer."""
        for key in self._waiting.keys() & known:
            del self._waiting[key]

    def found(self, has_its_parent: Callable[[BlockName], bool]) -> Iterable[Orphan]:
        """Takes out, one after the other, those whose parents are there when it is their turn."""
        for key, orphan in list(self._waiting.items()):
            if has_its_parent(orphan.name):
                del self._waiting[key]
                yield orphan

    def given_up(self) -> list[Orphan]:
        """Takes out those that have waited in vain."""
        now = time.monotonic()
        given_up = [orphan for orphan in self._waiting.values() if now > orphan.until]
        for orphan in given_up:
            del self._waiting[orphan.name.key]
        return given_up

    def bytes_by_journal(self) -> Counter[str]:
        """What waits, by the journal that told of it; those under the empty name the folder told of."""
        sizes = Counter[str]()
        for orphan in self._waiting.values():
            sizes[orphan.journal] += orphan.size
        return sizes
