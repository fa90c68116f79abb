"""Memory for frames of one size, in slabs allocated and freed as needed."""

from __future__ import annotations

import heapq
import mmap
from dataclasses import dataclass, field

import numpy as np

from prefix_store.frames.segments import Bytes

_SLAB_BYTES = 16 * 2**20


@dataclass(eq=False, slots=True)
class _Slab:
    """Memory for some frames; it returns to the system when no slot of it is used."""

    memory: Bytes
    blank: list[int]
    capacity: int


@dataclass(eq=False, slots=True)
class Slot:
    """Memory for one frame. It is freed once it is released and unused."""

    frame: Bytes = field(repr=False)
    number: int
    place: int
    users: int = 0
    is_kept: bool = True


class Slabs:
    """Slots for frames, at most as many as fit into a number of bytes.

    One thread uses it; other threads may read and fill a slot while they are counted as its users. The first slabs are
    filled first, so that the last ones empty when fewer frames are stored.
    """

    def __init__(self, frame_bytes: int, capacity_bytes: int) -> None:
        # Frames begin at multiples of a cache line.
        self._slot_bytes = -(-frame_bytes // 64) * 64
        self._frame_bytes = frame_bytes
        self.capacity = capacity_bytes // self._slot_bytes
        if not self.capacity:
            raise ValueError(f"{capacity_bytes:,} bytes, expected at least {frame_bytes:,}: one block of this model")
        self._per_slab = max(1, _SLAB_BYTES // self._slot_bytes)
        self._slabs: dict[int, _Slab] = {}
        self._with_room: list[int] = []
        self.used = 0

    @property
    def allocated_bytes(self) -> int:
        """Of all slabs; at most the capacity."""
        return sum(slab.capacity for slab in self._slabs.values()) * self._slot_bytes

    def take(self) -> Slot | None:
        """Room for a frame; None if there is none."""
        while self._with_room:
            number = self._with_room[0]
            slab = self._slabs.get(number)
            if slab is not None and slab.blank:
                return self._slot(number, slab)
            heapq.heappop(self._with_room)
        number = next((n for n in range(len(self._slabs) + 1) if n not in self._slabs), 0)
        size = min(self._per_slab, self.capacity - number * self._per_slab)
        if size <= 0:
            return None
        # A mapping of its own: in the heap, one used frame would keep all memory below it.
        memory = np.frombuffer(mmap.mmap(-1, size * self._slot_bytes), np.uint8)
        slab = self._slabs[number] = _Slab(memory, list(range(size))[::-1], size)
        heapq.heappush(self._with_room, number)
        return self._slot(number, slab)

    def free_later(self, slot: Slot) -> None:
        """Frees a slot as soon as it is unused."""
        slot.is_kept = False
        self._free_if_idle(slot)

    def use(self, slot: Slot) -> None:
        """Counts one more user."""
        slot.users += 1

    def unuse(self, slot: Slot) -> None:
        """One user fewer."""
        slot.users -= 1
        self._free_if_idle(slot)

    def _free_if_idle(self, slot: Slot) -> None:
        if slot.is_kept or slot.users:
            return
        self.used -= 1
        slab = self._slabs[slot.number]
        if not slab.blank:
            heapq.heappush(self._with_room, slot.number)
        slab.blank.append(slot.place)
        # One empty slab stays: otherwise single frames could allocate and free 16 MiB each time.
        if len(slab.blank) == slab.capacity and sum(len(s.blank) == s.capacity for s in self._slabs.values()) > 1:
            del self._slabs[slot.number]

    def _slot(self, number: int, slab: _Slab) -> Slot:
        self.used += 1
        place = slab.blank.pop()
        start = place * self._slot_bytes
        return Slot(slab.memory[start : start + self._frame_bytes], number, place)
