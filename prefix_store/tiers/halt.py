"""How the work of a thread is ended from outside, even where the thread hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Halted(Exception):
    """Nobody wants this work any more."""


class Halt:
    """Set once, by whoever no longer wants the work.

    A thread touches its caller's memory, and memory that is given on to others, only within ``with halt:``. So once it
    is set that memory is free, whether or not the thread has heard of it, or ever returns from the disk.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None

    def set(self) -> None:
        """Returns when nothing is being touched, which is at most one block later."""
        with self._lock:
            self._is_set = True
            if self._interrupt is not None:
                self._interrupt()

    def __enter__(self) -> None:
        """Begins to touch. Raises Halted once the halt is set; copying is all that is done inside."""
        self._lock.acquire()
        if self._is_set:
            self._lock.release()
            raise Halted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def interrupt_with(self, interrupt: Callable[[], None] | None) -> None:
        """From now on this call, which must not wait, ends what the thread waits for; None: nothing does."""
        with self._lock:
            self._interrupt = interrupt
            if self._is_set and interrupt is not None:
                interrupt()
