"""When rows expire: a doubly linked list of rows for every second in which any does."""

import heapq
from array import array

_NONE = -1
_FEW = 64


class Expiry:
    """Knows of each row 0 to len - 1 when it expires. Adding and removing take constant time. Not thread-safe.

    The links are rows, in two flat arrays: 16 bytes a row with its time, and nothing stays behind of a row that is
    removed long before it would have expired.
    """

    def __init__(self) -> None:
        self.times = array("d")
        self._next = array("i")
        self._previous = array("i")
        # Second -> first row of its list, or _NONE where all were removed. `_seconds` is a heap of the same seconds.
        self._heads: dict[int, int] = {}
        self._seconds: list[int] = []
        self._empty = 0

    def __len__(self) -> int:
        return len(self.times)

    @property
    def bytes(self) -> int:
        # A second has its slot in the dict, its place in the heap and an int of its own.
        return 16 * len(self.times) + 150 * len(self._heads)

    def append(self, expires: float) -> None:
        """Take in the next row, which expires at `expires`, Unix seconds."""
        row, second = len(self.times), int(expires)
        head = self._heads.get(second)
        self.times.append(expires)
        self._next.append(_NONE if head is None else head)
        self._previous.append(_NONE)
        if head is None:
            heapq.heappush(self._seconds, second)
        elif head == _NONE:
            self._empty -= 1
        else:
            self._previous[head] = row
        self._heads[second] = row

    def move_last_to(self, row: int) -> None:
        """Forget `row`; the last row takes its place."""
        self._bridge(row, self._next[row], self._previous[row])
        last = len(self.times) - 1
        if row != last:
            self._bridge(last, row, row)
        self.times[row], self._next[row], self._previous[row] = self.times[-1], self._next[-1], self._previous[-1]
        self.times.pop()
        self._next.pop()
        self._previous.pop()

    def due(self, now: float) -> int | None:
        """A row whose second is over at `now`, or None. A row is due less than a second after it has expired."""
        while self._seconds and self._seconds[0] < int(now):
            row = self._heads[self._seconds[0]]
            if row != _NONE:
                return row
            del self._heads[heapq.heappop(self._seconds)]
            self._empty -= 1
        return None

    def _bridge(self, row: int, after: int, before: int) -> None:
        """Let the neighbour in front of `row` point to `after`, and the one behind it to `before`."""
        next_row, previous_row = self._next[row], self._previous[row]
        if next_row != _NONE:
            self._previous[next_row] = before
        if previous_row != _NONE:
            self._next[previous_row] = after
            return
        self._heads[int(self.times[row])] = after
        if after == _NONE:
            self._empty += 1
            self._forget_empty_seconds()

    def _forget_empty_seconds(self) -> None:
        if self._empty > _FEW + len(self._heads) // 2:
            self._heads = {second: head for second, head in self._heads.items() if head != _NONE}
            self._seconds = list(self._heads)
            heapq.heapify(self._seconds)
            self._empty = 0
