"""Entries by row: the vector in 16-bit fixed-point numbers, expiry, partition."""

import heapq
import threading

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

# Components of unit vectors are at most 1. Half-precision floats would be as small and as exact, but NumPy turns
# these into float32 four times as fast.
_SCALE = 32767.0
# Rows that are scored at once: their float32 values fit in the core's own cache.
_BLOCK = 256
# Grows and shrinks by as much, so that neither blocks a search for long: 1.5 MiB at 384 dimensions.
_STEP = 2048


class RowTable:
    """An entry keeps its row until it is removed; the lowest free row is used next.

    Whoever reads or changes it, or anything that refers to its rows, holds `lock`.

    A stored vector gives cosines that are off by 1e-5 on average, 6e-5 at most, for any unit vectors.
    """

    def __init__(self, dimensions: int) -> None:
        self.lock = threading.RLock()
        self.entries: list[str] = []
        self.owners = np.zeros(0, np.int64)
        """Of each row the number of the partition, 0 for a free row."""
        self.stamps = np.zeros(0, np.int64)
        """Of each row the number of its last addition."""
        self.additions = 0
        self._codes = np.zeros((0, dimensions), np.int16)
        self._expires = np.zeros(0)
        self._columns = (self._codes, self._expires, self.owners, self.stamps)
        self._free: list[int] = []

    def __len__(self) -> int:
        """Rows, with free ones between those in use."""
        return len(self.entries)

    @property
    def bytes(self) -> int:
        """Of all columns but the entries' ids."""
        return sum(column.nbytes for column in self._columns) + 8 * (len(self) + len(self._free))

    def add(self, entry: str, owner: int, vector: Floats, expires: float) -> int:
        """Store a unit vector [d]; returns its row."""
        if self._free and self._free[0] < len(self):
            row = heapq.heappop(self._free)
            self.entries[row] = entry
        else:
            self._free.clear()  # rows that were cut off
            row = len(self)
            self.entries.append(entry)
            if row == len(self.owners):
                self._resize(row + _STEP)
        self.additions += 1
        np.rint(vector * np.float32(_SCALE), out=self._codes[row], casting="unsafe")
        self._expires[row], self.owners[row], self.stamps[row] = expires, owner, self.additions
        return row

    def remove(self, row: int) -> int:
        """Frees a row, and the memory of free rows at the end; returns the partition's number."""
        owner = int(self.owners[row])
        self.entries[row] = ""
        self.owners[row] = 0
        heapq.heappush(self._free, row)
        while self.entries and not self.owners[len(self) - 1]:
            self.entries.pop()
        if len(self) <= len(self.owners) - 2 * _STEP:
            self._resize(len(self) + _STEP)
        return owner

    def rows_of(self, owner: int) -> Rows:
        """All rows of a partition, int64 [n], ascending."""
        return np.flatnonzero(self.owners[: len(self)] == owner)

    def still_of(self, owner: int, rows: Rows) -> Rows:
        """Those of rows [n], whatever became of them, that are of a partition now."""
        known = rows[rows < len(self)]
        still: Rows = known[self.owners[known] == owner]
        return still

    def alive(self, rows: Rows, now: float) -> Rows:
        """Those of rows in use that expire after `now`, Unix seconds."""
        return rows[self._expires[rows] > now]

    def alive_bitmap(self, now: float) -> npt.NDArray[np.uint8]:
        """As `alive`, a bit for each row, lowest first."""
        return np.packbits(self._expires[: len(self)] > now, bitorder="little")

    def vectors(self, rows: Rows) -> Floats:
        """float32 [n, d] of int64 [n]; a copy."""
        return self._codes.take(rows, axis=0).astype(np.float32) / np.float32(_SCALE)

    def cosines(self, rows: Rows, vector: Floats) -> Floats:
        """float32 [n]: the cosines of rows [n] to a unit vector [d]."""
        found = np.empty(len(rows), np.float32)
        for start in range(0, len(rows), _BLOCK):
            block = self._codes.take(rows[start : start + _BLOCK], axis=0).astype(np.float32)
            np.dot(block, vector, out=found[start : start + _BLOCK])
        found /= np.float32(_SCALE)
        return np.clip(found, -1.0, 1.0, out=found)

    def _resize(self, rows: int) -> None:
        # In place: nothing else refers to these arrays, since everything handed out is a copy. The C library moves
        # an array of this size by its page table, without copying it.
        for column in self._columns:
            column.resize((rows, *column.shape[1:]), refcheck=False)
