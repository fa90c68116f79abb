"""The writes that wait for Redis: one for each entry, bounded, in the order in which they came."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from cache.entries.entry import Entry

_MAX_BYTES = 64 * 2**20
_OVERHEAD_BYTES = 1500
_WRITES_PER_BATCH = 64
_BYTES_PER_BATCH = 8 * 2**20
# How long a write is tried again that Redis cannot take now, such as during a failover.
_RETRY_SECONDS = 30.0


class Write(NamedTuple):
    """A pending write: an entry until `expires` (monotonic seconds), or None for its removal."""

    entry: Entry | None
    expires: float
    size: int
    queued: float

    def current(self) -> Entry | None:
        return self.entry if self.expires > time.monotonic() else None


class WriteQueue:
    """At most 64 MiB of writes."""

    def __init__(self) -> None:
        self._writes: OrderedDict[str, Write] = OrderedDict()
        self._bytes = 0
        self._has_some = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._writes)

    def get(self, entry_id: str) -> Write | None:
        return self._writes.get(entry_id)

    async def wait(self) -> None:
        """Returns when there is a write."""
        await self._has_some.wait()

    def put(self, entry_id: str, entry: Entry | None, keep_for: float) -> bool:
        """Queues a write in place of an older one of the same entry; False if there is no room."""
        self.remove(entry_id)
        size = _OVERHEAD_BYTES + (len(entry.body) if entry else 0)
        if self._bytes + size > _MAX_BYTES:
            return False
        now = time.monotonic()
        self._writes[entry_id] = Write(entry, now + keep_for, size, now)
        self._bytes += size
        self._has_some.set()
        return True

    def remove(self, entry_id: str) -> bool:
        """Forgets a write; False if there was none, or its entry has expired."""
        write = self._writes.pop(entry_id, None)
        if write is None:
            return False
        self._bytes -= write.size
        if not self._writes:
            self._has_some.clear()
        return write.current() is not None

    def discard(self, is_unwanted: Callable[[Entry], bool]) -> int:
        """Forgets the writes of some entries; returns how many."""
        unwanted = [entry_id for entry_id, write in self._writes.items() if write.entry and is_unwanted(write.entry)]
        for entry_id in unwanted:
            self.remove(entry_id)
        return len(unwanted)

    def batch(self) -> list[tuple[str, Write]]:
        """The oldest writes, at least one of them and no more than a slow link sends in time."""
        found: list[tuple[str, Write]] = []
        size = 0
        for entry_id, write in self._writes.items():
            size += write.size
            if found and (size > _BYTES_PER_BATCH or len(found) == _WRITES_PER_BATCH):
                break
            found.append((entry_id, write))
        return found

    def done(self, entry_id: str, write: Write) -> None:
        """Forgets a write, unless a newer one has taken its place."""
        if self._writes.get(entry_id) is write:
            self.remove(entry_id)

    def retry(self, entry_id: str, write: Write) -> bool:
        """Lets a write wait behind the others; False, and forgotten, when it has waited for too long."""
        if self._writes.get(entry_id) is not write:
            return True
        if time.monotonic() - write.queued > _RETRY_SECONDS:
            self.remove(entry_id)
            return False
        self._writes.move_to_end(entry_id)
        return True
