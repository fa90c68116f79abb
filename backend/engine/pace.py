"""How fast answers end, as measured, and so how soon there is room for another one."""

from __future__ import annotations

import math
from collections import deque

_WINDOW = 64
_LONGEST = 60


class Pace:
    """Mean time between two ends of answers, over the last ones since the server was idle.

    All times are ``time.monotonic()`` seconds, given by the caller.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_WINDOW)
        self._since = 0.0

    def begin(self, now: float) -> None:
        """The first answer after an idle time has begun."""
        self._ends.clear()
        self._since = now

    def note_ended(self, answers: int, now: float) -> None:
        """Answers have ended, whole or not: each leaves room for another one."""
        for _ in range(answers):
            if len(self._ends) == _WINDOW:
                self._since = self._ends[0]
            self._ends.append(now)

    def seconds_for(self, answers: int, now: float) -> int:
        """Whole seconds until so many more answers should have ended, from 1 to 60.

        Before any has ended, the time that has passed since the first began stands for the mean.
        """
        between = (now - self._since) / max(1, len(self._ends))
        return max(1, min(_LONGEST, math.ceil(answers * between)))
