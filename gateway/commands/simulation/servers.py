"""Servers that do one thing after the other, and the clock that all of them share."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


class Clock:
    """Runs what is due, in the order of time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, run: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time, next(self._numbers), run))

    def run_until(self, time: float) -> None:
        """Everything that is due up to then."""
        while self._due and self._due[0][0] <= time:
            self.now, _, run = heapq.heappop(self._due)
            run()
        self.now = max(self.now, time)

    def run(self) -> None:
        """Everything that is due, and what follows from it."""
        while self._due:
            self.run_until(self._due[0][0])


@dataclass(slots=True)
class Window:
    """From when until when is measured."""

    start: float
    end: float

    def overlap(self, start: float, end: float) -> float:
        return max(0.0, min(end, self.end) - max(start, self.start))


@dataclass(slots=True)
class Server:
    """Works on one job at a time, in the order in which they come."""

    name: str
    clock: Clock
    window: Window
    busy: float = 0.0
    """Seconds of work within the window."""
    waits: list[float] = field(default_factory=list)
    """Seconds that each job which came within the window has waited."""
    died_at: float | None = None
    _free_at: float = 0.0

    def serve(self, seconds: float) -> float:
        """Take a job that comes now; returns when it is done, if the server lives that long."""
        now = self.clock.now
        start = max(now, self._free_at)
        self._free_at = start + seconds
        self.busy += self.window.overlap(start, self._free_at)
        if self.window.start <= now <= self.window.end:
            self.waits.append(start - now)
        return self._free_at

    @property
    def is_dead(self) -> bool:
        return self.died_at is not None and self.clock.now >= self.died_at

    @property
    def utilisation(self) -> float:
        """The share of the window in which it worked."""
        return self.busy / (self.window.end - self.window.start)
