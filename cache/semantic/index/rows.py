"""The columns of every row: vector, expiry, entry, partition, and its place in the partition."""

from array import array

import numpy as np

from cache.semantic.index.lists import InvertedLists
from cache.semantic.index.partition import Partition
from cache.semantic.index.table import Floats, Rows, VectorTable


class RowStore:
    """Columns without holes: when a row is removed, the last one gets its number, here, in its partition and in FAISS.

    So memory shrinks as rows are removed. The caller holds the lock of the index.

    `moving` are the rows that are being moved into lists. One that is removed or renumbered meanwhile leaves the set,
    so that its computed list is not used: lists never have a wrong row.
    """

    def __init__(self, dimensions: int) -> None:
        self.table = VectorTable(dimensions)
        # Expiry of each, Unix seconds.
        self.times = array("d")
        self.entries: list[str] = []
        self.owners: list[Partition] = []
        # The position in the partition's `flat`, or else the mark of the lists that have the row.
        self.places = array("i")
        self.moving: set[int] = set()

    def __len__(self) -> int:
        return len(self.entries)

    def append(self, entry: str, owner: Partition, vector: Floats, expires: float) -> int:
        """Put a new row into `flat` of its partition; returns its number."""
        row = self.table.append(vector)
        self.times.append(expires)
        self.entries.append(entry)
        self.owners.append(owner)
        self.places.append(len(owner.flat))
        owner.flat.append(row)
        return row

    def remove(self, row: int) -> str | None:
        """Removes a row. Returns the entry that has its number now; None if the row was the last one."""
        self._take_out(row)
        self.moving.discard(row)
        last = len(self) - 1
        if row != last:
            self._renumber(last, row)
            self.moving.discard(last)
        self.entries[row], self.owners[row], self.places[row] = self.entries[-1], self.owners[-1], self.places[-1]
        self.times[row] = self.times[-1]
        self.entries.pop()
        self.owners.pop()
        self.places.pop()
        self.times.pop()
        self.table.move_last_to(row)
        return None if row == last else self.entries[row]

    def move_into(self, lists: InvertedLists, rows: Rows, vectors: Floats, numbers: Rows) -> None:
        """Move those of rows [n] that are still `moving` from where they are to their `numbers` [n] of `lists`."""
        kept = np.fromiter((row in self.moving for row in rows.tolist()), np.bool_, len(rows))
        self.moving.clear()
        rows = rows[kept]
        if not len(rows):
            return
        self._take_all_out(rows)
        lists.add(rows, vectors[kept], numbers[kept])
        for row in rows.tolist():
            self.places[row] = lists.mark

    def move_to_flat(self, rows: Rows) -> None:
        """Move rows [n], all in lists of one partition, back to its `flat`."""
        self._take_all_out(rows)
        for row in rows.tolist():
            flat = self.owners[row].flat
            self.places[row] = len(flat)
            flat.append(row)

    def _take_out(self, row: int) -> None:
        owner, place = self.owners[row], self.places[row]
        if place < 0:
            owner.marked(place).remove(np.array([row], np.int64))
            return
        last = owner.flat.pop()
        if last != row:
            owner.flat[place] = last
            self.places[last] = place

    def _take_all_out(self, rows: Rows) -> None:
        """Rows of one partition that are in the same place of it."""
        owner, place = self.owners[rows[0]], self.places[rows[0]]
        if place < 0:
            owner.marked(place).remove(rows)
            return
        for row in rows.tolist():
            self._take_out(row)

    def _renumber(self, row: int, to: int) -> None:
        owner, place = self.owners[row], self.places[row]
        if place < 0:
            owner.marked(place).rename(row, to, self.table.vectors(np.array([row], np.int64))[0])
        else:
            owner.flat[place] = to
