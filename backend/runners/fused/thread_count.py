"""How many threads compute a step, and how they wait for each other.

The threads of a step meet at some hundred barriers. If another process occupies one of the cores, each barrier may
last until the system preempts that process, and a step of 15 ms takes half a second; one thread alone is then far
quicker. Results are bitwise the same with any number of threads.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

# All threads are used unless they take longer than this many times the time of a single thread.
_MIN_SPEEDUP = 1.2
# Consecutive slow steps before the number of threads is reduced: a single one may be noise.
_SLOW_STEPS = 2
_FIRST_PAUSE = 16
_LONGEST_PAUSE = 1024
# Contexts grow, so the time of a single thread is measured again after so many steps.
_REFRESH = 256
# A neighbour may come and go many times a minute.
_SILENT_SECONDS = 600.0


@dataclass(slots=True)
class _SingleThreadTime:
    """Seconds that a single thread took for a step, and how many steps ago."""

    seconds: float
    age: int = 0


class ThreadCount:
    """Chooses between all threads and one by the time that steps with a similar number of rows have taken.

    Args:
        max_threads: to use while no other process occupies a core.
        clock: seconds.
    """

    def __init__(self, max_threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_threads = max_threads
        self._single: dict[int, _SingleThreadTime] = {}
        self._single_thread_steps = 0
        self._pause = _FIRST_PAUSE
        self._slow = 0
        self._clock = clock
        self._told_at: float | None = None

    def threads(self, rows: int) -> int:
        """Threads for the next step."""
        if self._max_threads == 1 or self._single_thread_steps:
            return 1
        single_thread = self._single.get(rows.bit_length())
        return 1 if single_thread is None or single_thread.age >= _REFRESH else self._max_threads

    def record(self, rows: int, threads: int, seconds: float) -> None:
        """Records the time of a step."""
        if self._max_threads == 1:
            return
        if threads == 1:
            self._single[rows.bit_length()] = _SingleThreadTime(seconds)
            self._single_thread_steps = max(0, self._single_thread_steps - 1)
            return
        single_thread = self._single[rows.bit_length()]
        single_thread.age += 1
        if seconds <= _MIN_SPEEDUP * single_thread.seconds:
            self._slow, self._pause = 0, _FIRST_PAUSE
            return
        self._slow += 1
        if self._slow >= _SLOW_STEPS:
            if self._pause == _FIRST_PAUSE:
                self._tell()
            self._single_thread_steps = self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _tell(self) -> None:
        now = self._clock()
        is_new = self._told_at is None or now - self._told_at >= _SILENT_SECONDS
        self._told_at = now if is_new else self._told_at
        level = logging.WARNING if is_new else logging.DEBUG
        logger.log(level, "another process keeps a core busy; going on with one thread for a while")


# A thread that waits at a barrier first spins, by default for milliseconds. When another process takes one of the
# cores, the spinning thread keeps the other from the thread it waits for, and a step becomes several times slower.
# A thousand rounds are some microseconds, longer than the threads wait for each other on free cores.
_SPIN_ROUNDS = "1000"


def limit_spinning() -> None:
    """Sets OpenMP's spinning unless the user did; only has an effect before torch, which brings OpenMP, is imported."""
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_ROUNDS)
