"""What answers of a machine cost that is paid by the hour: its price is divided evenly among the requests under way.

This is processor sharing (Kleinrock, "Time-shared Systems: A theoretical treatment", JACM 1967) with its virtual time:
V(t) is the integral of dt / n(t), n being the number of requests under way. A request that begins at a and ends at b
has used V(b) - V(a) seconds of the machine, so each event costs O(1), and all shares together are the busy time.
"""

import time
from collections import deque
from collections.abc import Callable

_HOUR = 3600.0
_WINDOW = 600.0
_SLOT = 10.0


class MachineShare:
    """A request's part of the machine; `cost` is known when the request has ended."""

    __slots__ = ("begun", "cost")

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.cost = 0.0


class Machine:
    """The meter of one machine in one process.

    `price_per_hour` is this process's part: workers do not see each other's requests, so each divides its own part of
    the price, and together they never charge more than the machine costs.
    """

    def __init__(self, price_per_hour: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.price_per_hour = price_per_hour
        self._clock = clock
        self._running = 0
        self._virtual = 0.0
        self._seen = clock()
        self._slots: deque[list[float]] = deque()  # [begin, busy seconds, tokens], of the last ten minutes

    def begin(self) -> MachineShare:
        """A request begins, which `end` must be told the end of, however it ends."""
        self._advance()
        self._running += 1
        return MachineShare(self._virtual)

    def end(self, share: MachineShare) -> None:
        """The request has ended: its cost is known."""
        self._advance()
        share.cost = (self._virtual - share.begun) * self.price_per_hour / _HOUR
        self._running -= 1
        if not self._running:
            self._virtual = 0.0  # nobody refers to it, and small numbers are precise

    def count(self, tokens: int) -> None:
        """The tokens of a prompt and its answer, for `throughput`."""
        self._slot()[2] += tokens

    def throughput(self) -> tuple[int, float]:
        """(tokens, busy seconds) of the last ten minutes."""
        self._advance()
        self._slot()
        return int(sum(slot[2] for slot in self._slots)), sum(slot[1] for slot in self._slots)

    def cost_per_1k_tokens(self) -> float | None:
        """US dollars for a thousand tokens of prompts and answers, as measured; None without tokens."""
        tokens, busy = self.throughput()
        return busy * self.price_per_hour / _HOUR / tokens * 1000 if tokens else None

    def _advance(self) -> None:
        now = self._clock()
        passed, self._seen = now - self._seen, now
        if self._running:
            self._virtual += passed / self._running
            self._slot()[1] += passed

    def _slot(self) -> list[float]:
        """The slot of now; those that are older than the window are dropped."""
        if not self._slots or self._seen - self._slots[-1][0] >= _SLOT:
            self._slots.append([self._seen, 0.0, 0.0])
        while self._seen - self._slots[0][0] > _WINDOW:
            self._slots.popleft()
        return self._slots[-1]
