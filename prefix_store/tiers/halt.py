"""How the work of a thread is ended from outside, even where the thread hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType


class Halted(Exception):
    """Nobody wants this work any more."""


class Halt:
    """Set once, in any thread, by whoever no longer wants the work. One of them may be for several pieces of work.

    A thread touches its caller's memory, and memory that is given on to others, only within ``with halt:``. So once it
    is set that memory is free, whether or not the thread has heard of it, or ever returns from the disk.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._followers: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether anybody has begun to set it. While it is being set, a thread may still be touching."""
        return self._is_set

    def set(self) -> None:
        """Returns when nothing is being touched, which is at most one block later."""
        # Before the lock, which is not fair: the thread may take it again and again while this waits for it.
        self._is_set = True
        with self._lock:
            if self._interrupt is not None:
                self._interrupt()
            # Called with the lock held, so that nobody who has let a follower go is called any more.
            for follower in self._followers:
                follower()

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

    @contextlib.contextmanager
    def followed_by(self, follower: Callable[[], None]) -> Iterator[None]:
        """Within this, `set` calls it too before it returns; at once where that has been called already.

        It may be called more than once, in any thread, and must not wait for longer than `set` may.
        """
        with self._lock:
            self._followers.append(follower)
            if self._is_set:
                follower()
        try:
            yield
        finally:
            with self._lock:
                self._followers.remove(follower)
