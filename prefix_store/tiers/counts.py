"""Counters of a tier, its log of failures, and the progress of one read or write."""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CANCELLED = "the sources were taken back"
"""The reason of blocks that were dropped because the write was cancelled (see `CancelToken`)."""


@dataclass(slots=True)
class TierCounts:
    """Counts of blocks unless the name says otherwise; they only grow."""

    hits: int = 0
    """Restored."""
    misses: int = 0
    """Requested and not restored, for any reason."""
    bytes_read: int = 0
    """Of frames that were restored."""
    read_seconds: float = 0.0
    """Spent on them: bytes / seconds is the live bandwidth."""
    writes: int = 0
    bytes_written: int = 0
    evictions: int = 0
    bad_frames: Counter[str] = field(default_factory=Counter)
    """Damaged and removed, by the header field that failed."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Offered and not stored, by reason."""
    io_errors: Counter[str] = field(default_factory=Counter)
    """Failed calls to the system or a peer, by error name."""


@dataclass(slots=True)
class Progress:
    """Blocks done so far. Counted under the cancel token's lock, so the count is final once the token is set."""

    done: int = 0
    """Blocks of a chain, from the first requested one on."""


log = logging.getLogger(__name__)


class FailureLog:
    """The failures of one kind of call. One thread uses it."""

    def __init__(self, doing: str, counter: Counter[str]) -> None:
        """`doing` completes the sentence "failed while ..."."""
        self._doing = doing
        self._counter = counter
        self._last = ""

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Within this an OSError is recorded, and ends the block; without one the calls work again."""
        try:
            yield
            self.recovered()
        except OSError as error:
            self.failed(error)

    def failed(self, error: OSError) -> None:
        """Counts it under its name, such as ENOSPC; logs it unless the last one was the same."""
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        self._counter[name] += 1
        if name != self._last:
            self._last = name
            log.warning("failed while %s: %s", self._doing, error)

    def recovered(self) -> None:
        """Logs the recovery after a failure."""
        if self._last:
            self._last = ""
            log.info("works again: %s", self._doing)
