"""How many threads a step gets: all there are, or one while a neighbour keeps a core busy.

Threads of a step wait for each other some hundred times. With a neighbour on one of the cores each of these waits may
last until the system takes the core away from it again, and a step of 15 ms takes half a second. One thread alone is
then far quicker. Results are the same either way.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# Many threads that take longer than this times one alone are not worth having.
_WORTH = 1.2
# Slow steps in a row before they count: a single one may be anything.
_SLOW_STEPS = 2
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 1024
# Contexts grow, and what one thread took is measured again after so many steps.
_REFRESH = 256


@dataclass(slots=True)
class _Alone:
    """Seconds that one thread took for a step, and how many steps ago."""

    seconds: float
    age: int = 0


class ThreadChoice:
    """Compares what steps take with all threads and with one. Steps of similar numbers of rows are compared.

    Args:
        most: threads to use where nobody is in the way.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._alone: dict[int, _Alone] = {}
        self._steps_alone = 0
        self._pause = _FIRST_PAUSE
        self._slow = 0

    def threads(self, rows: int) -> int:
        """Threads for the next step."""
        if self._most == 1 or self._steps_alone:
            return 1
        alone = self._alone.get(rows.bit_length())
        return 1 if alone is None or alone.age >= _REFRESH else self._most

    def note(self, rows: int, threads: int, seconds: float) -> None:
        """What a step took."""
        if self._most == 1:
            return
        if threads == 1:
            self._alone[rows.bit_length()] = _Alone(seconds)
            self._steps_alone = max(0, self._steps_alone - 1)
            return
        alone = self._alone[rows.bit_length()]
        alone.age += 1
        if seconds <= _WORTH * alone.seconds:
            self._slow, self._pause = 0, _FIRST_PAUSE
            return
        self._slow += 1
        if self._slow >= _SLOW_STEPS:
            if self._pause == _FIRST_PAUSE:
                logger.warning("another process keeps a core busy; going on with one thread for a while")
            self._steps_alone = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)


# A thread that waits at a barrier first spins, by default for milliseconds. When another process takes one of the
# cores, the spinning thread keeps the other from the thread it waits for, and a step becomes several times slower.
# A thousand rounds are some microseconds, longer than the threads wait for each other on free cores.
_SPIN_ROUNDS = "1000"


def limit_spinning() -> None:
    """Sets OpenMP's spinning unless the user did; only has an effect before torch, which brings OpenMP, is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_ROUNDS)
