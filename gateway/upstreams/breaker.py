"""When an upstream that fails is left alone (Nygard, "Release It!", 2nd edition, 2018, section 5.2: circuit breaker).

closed ──failures in a row──► open ──after `open_for`──► half-open ──the trial begins to answer──► closed
                                ▲                            │
                                └──the trial fails: twice as long, up to a minute
"""

import time
from collections.abc import Callable
from enum import Enum
from typing import Literal

from gateway.settings.upstreams import BreakerSettings

_LONGEST = 60.0


class Admission(Enum):
    """Whether a request may be sent, and whether it is the one that tries an upstream that was left alone."""

    REFUSED = 0
    ADMITTED = 1
    TRIAL = 2


class Breaker:
    """Counts the failures of one upstream. It has no lock: one event loop uses it."""

    def __init__(self, settings: BreakerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._failures = 0
        self._open_for = settings.open_for
        self._open_until: float | None = None
        self._has_trial = False
        self._is_unreachable = False

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if self._open_until is None:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def remaining(self) -> float:
        """Seconds for which it stays open."""
        return 0.0 if self._open_until is None else max(0.0, self._open_until - self._clock())

    def admit(self) -> Admission:
        """Whether a request may be sent now. A TRIAL ends with `began`, `failed` or `leave_trial`."""
        if self._open_until is None:
            return Admission.ADMITTED
        if self._has_trial or self._clock() < self._open_until:
            return Admission.REFUSED
        self._has_trial = True
        return Admission.TRIAL

    def leave_trial(self) -> None:
        """The trial has ended and says nothing of the upstream."""
        self._has_trial = False

    def began(self) -> None:
        """It has begun to answer well, which closes the breaker. Until an answer ends well, one failure opens it."""
        if self._open_until is not None:
            self._open_until = None
            self._has_trial = False
            self._failures = self._settings.failures - 1

    def completed(self) -> None:
        """An answer has ended well."""
        if self._open_until is None:
            self._failures = 0
            self._open_for = self._settings.open_for

    def checked(self) -> None:
        """A health check went well. That closes a breaker which is open since there was no connection."""
        if self._open_until is not None and self._is_unreachable:
            self.began()

    def failed(self, *, unreachable: bool = False, is_trial: bool = False) -> None:
        """A request failed by the upstream's fault; with `unreachable` there was no connection."""
        is_closed = self._open_until is None
        if not is_closed and not is_trial:  # it was sent before the breaker opened
            return
        self._failures += 1
        self._is_unreachable = unreachable
        if not is_closed or self._failures >= self._settings.failures:
            self._open_until = self._clock() + self._open_for
            self._open_for = min(2 * self._open_for, max(_LONGEST, self._settings.open_for))
            self._has_trial = False
