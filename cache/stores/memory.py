"""The first tier: entries in this process, bounded by bytes, with LRU eviction."""

import sys
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from cache.entries.entry import Entry

# What a slot, a form and an alias cost beside their payload: the objects and the dict cells. CPython 3.11 takes at
# most 850, 120 and 190 bytes; tests/cache/stores/test_memory.py measures it with tracemalloc.
SLOT_OVERHEAD_BYTES = 950
_FORM_BYTES = 120
# A request in each form of API, streamed and not, and as many again that say the same in other bytes.
_ALIASES_PER_SLOT = 16
_ALIAS_BYTES = 200


class Slot(msgspec.Struct, eq=False, gc=False):
    """An entry in memory, with its encoded answers and digests of raw requests for it; `size` in bytes.

    It is in no reference cycle, so Python's cycle collector, which stops the process, skips it.
    """

    entry: Entry
    expires: float
    size: int
    forms: dict[str, bytes] = {}
    aliases: tuple[bytes, ...] = ()


class MemoryStore:
    """A `Store` of at most `capacity` bytes; an entry larger than an eighth of it is not kept."""

    def __init__(self, capacity: int, clock: Callable[[], float] = time.time) -> None:
        self._capacity = capacity
        self._largest = capacity // 8
        self._clock = clock
        self._slots: OrderedDict[str, Slot] = OrderedDict()
        self._aliases: dict[bytes, tuple[Slot, str]] = {}
        self.size = 0
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._slots)

    async def get(self, entry_id: str) -> Entry | None:
        slot = self.slot(entry_id)
        return slot.entry if slot else None

    def slot(self, entry_id: str) -> Slot | None:
        slot = self._slots.get(entry_id)
        if slot is None:
            return None
        if slot.expires <= self._clock():
            self._drop(entry_id)
            return None
        self._slots.move_to_end(entry_id)
        return slot

    async def put(self, entry: Entry, keep_for: float) -> None:
        self._drop(entry.id)
        size = SLOT_OVERHEAD_BYTES + len(entry.body) + sys.getsizeof(entry.model) + sys.getsizeof(entry.asked)
        if entry.tags:
            size += sys.getsizeof(entry.tags)
            size += sum(sys.getsizeof(tag) + sum(map(sys.getsizeof, tag)) for tag in entry.tags)
        slot = Slot(entry, self._clock() + keep_for, size)
        if not keep_for > 0 or slot.size > self._largest:
            return
        self._slots[entry.id] = slot
        self.size += slot.size
        self._make_room()

    async def delete(self, entry_id: str) -> bool:
        return self._drop(entry_id)

    def form(self, slot: Slot, name: str, make: Callable[[Entry], bytes]) -> bytes:
        """The entry as bytes ready to send, made by `make`; kept with the slot unless both together are too large."""
        form = slot.forms.get(name)
        if form is None:
            form = make(slot.entry)
            size = _FORM_BYTES + (0 if form is slot.entry.body else len(form))
            if self._slots.get(slot.entry.id) is slot and slot.size + size <= self._largest:
                slot.forms[name] = form
                self._grow(slot, size)
        return form

    def alias(self, slot: Slot, raw_digest: bytes, form: str) -> None:
        """Remember that a request with exactly these bytes is answered by this form of the slot, if it is kept."""
        known = raw_digest in self._aliases
        if known or form not in slot.forms or self._slots.get(slot.entry.id) is not slot:
            return
        if len(slot.aliases) < _ALIASES_PER_SLOT and slot.size + _ALIAS_BYTES <= self._largest:
            slot.aliases += (raw_digest,)
            self._aliases[raw_digest] = (slot, form)
            self._grow(slot, _ALIAS_BYTES)

    def by_alias(self, raw_digest: bytes) -> tuple[Slot, str] | None:
        found = self._aliases.get(raw_digest)
        if found is None:
            return None
        slot = found[0]
        if slot.expires <= self._clock():
            self._drop(slot.entry.id)
            return None
        self._slots.move_to_end(slot.entry.id)
        return found

    def peek(self, entry_id: str) -> Entry | None:
        """The entry, without counting as a use of it."""
        slot = self._slots.get(entry_id)
        return slot.entry if slot else None

    def entries(self) -> list[Entry]:
        """Those kept at this moment, oldest use first, expired ones as well."""
        return [slot.entry for slot in self._slots.values()]

    def ids(self) -> list[str]:
        """The ids kept at this moment, oldest use first."""
        return list(self._slots)

    def problems(self) -> list[str]:
        """Violated invariants, in sentences; empty if there are none."""
        found = []
        if self.size > self._capacity:
            found.append(f"{self.size} bytes are kept, and the capacity is {self._capacity}")
        if self.size != sum(slot.size for slot in self._slots.values()):
            found.append(f"the size is {self.size}, and the slots add up to another one")
        for entry_id, slot in self._slots.items():
            payload = len(slot.entry.body) + sum(len(f) for f in slot.forms.values() if f is not slot.entry.body)
            if slot.entry.id != entry_id:
                found.append(f"slot {entry_id} has the entry {slot.entry.id}")
            if not payload <= slot.size <= self._largest:
                found.append(f"slot {entry_id} has {payload} bytes of payload and counts {slot.size}")
        for raw_digest, (slot, form) in self._aliases.items():
            if self._slots.get(slot.entry.id) is not slot or raw_digest not in slot.aliases:
                found.append(f"alias {raw_digest.hex()} leads to a slot that is gone or does not know it")
            if form not in slot.forms:
                found.append(f"alias {raw_digest.hex()} leads to the form {form}, which is not kept")
        if len(self._aliases) != sum(len(slot.aliases) for slot in self._slots.values()):
            found.append("a slot has an alias that is not found")
        return found

    def _grow(self, slot: Slot, size: int) -> None:
        slot.size += size
        self.size += size
        self._slots.move_to_end(slot.entry.id)
        self._make_room()

    def _make_room(self) -> None:
        while self.size > self._capacity:
            self._drop(next(iter(self._slots)))
            self.evictions += 1

    def _drop(self, entry_id: str) -> bool:
        slot = self._slots.pop(entry_id, None)
        if slot is None:
            return False
        self.size -= slot.size
        for raw_digest in slot.aliases:
            del self._aliases[raw_digest]
        return True
