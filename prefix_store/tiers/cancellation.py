"""Cancellation of a thread's work from outside, even if the thread hangs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from types import TracebackType


class Cancelled(Exception):
    """The work was cancelled."""


class CancelToken:
    """Set once, in any thread, to cancel work; one token may serve several pieces of work.

    A thread touches its caller's memory only within ``with token:``; frames that are lent (`HostMemory.lend`) are not
    its caller's. Once `set` has returned that memory is free, whether or not the thread has noticed, or ever returns
    from the disk.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._followers: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether `set` was called. Until it returns, a thread may still be touching memory."""
        return self._is_set

    def set(self) -> None:
        """Cancels the work; returns when no memory is being touched, at most one block later."""
        # Before the lock, which is not fair: the thread may take it again and again while this waits for it.
        self._is_set = True
        with self._lock:
            if self._interrupt is not None:
                self._interrupt()
            # Called with the lock held: a removed follower is never called.
            for follower in self._followers:
                follower()

    def __enter__(self) -> None:
        """Enters a section that touches memory. Raises Cancelled once the token is set."""
        self._lock.acquire()
        if self._is_set:
            self._lock.release()
            raise Cancelled

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def set_interrupt(self, interrupt: Callable[[], None] | None) -> None:
        """Sets the call, which must not block, that interrupts what the thread waits for; None removes it."""
        with self._lock:
            self._interrupt = interrupt
            if self._is_set and interrupt is not None:
                interrupt()

    @contextlib.contextmanager
    def on_cancel(self, follower: Callable[[], None]) -> Iterator[None]:
        """Within this, `set` calls `follower` before it returns; at once if the token is set already.

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
