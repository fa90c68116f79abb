"""Which failures of an upstream are worth another try, and where. docs/decisions/026-retries.md says why."""

import email.utils
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gateway.errors import (
    DeadlineExceeded,
    GatewayError,
    NoUpstream,
    TooManyRequests,
    UpstreamError,
    UpstreamUnreachable,
)
from gateway.upstreams.upstream import Upstream, UpstreamResponse

# Statuses of servers that have not worked on the request.
_REFUSED = frozenset({429, 502, 503, 529})
_NOT_IMPLEMENTED = 501
_NOT_ITS_FAULT = frozenset({429, 500})


class Retry(Enum):
    """Where a request may be sent after a failure."""

    FREELY = "nothing was sent: to any upstream, and the next one costs no retry"
    ANYWHERE = "nothing was worked on: to another upstream at once, to the same after a pause"
    ELSEWHERE = "it may be the request's own fault: to one other upstream"
    NOWHERE = "there is no time left"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an upstream gave no answer that counts: an error, or an `answer` that is one (its body is held)."""

    upstream: Upstream
    retry: Retry
    error: UpstreamError | None = None
    answer: UpstreamResponse | None = None
    retry_after: float | None = None
    """Seconds, as the upstream says."""
    is_left_alone: bool = False
    """Whether it was not asked since its breaker is open."""
    can_repeat: bool = True
    """Whether the same upstream may be asked again after a pause."""
    is_fault: bool = False
    """Whether the answer shows that the upstream is ill."""
    is_unproven: bool = False
    """Whether it is the upstream's fault only if another one answers the request."""
    is_trial: bool = False
    """Whether it was the request that tries an upstream which had been left alone."""

    @property
    def message(self) -> str:
        if self.error is not None:
            return self.error.message
        return f"{self.upstream.title} answered with status {self.answer.status if self.answer else 0}."

    @property
    def label(self) -> str:
        """The reason, for the metrics."""
        if self.is_left_alone:
            return "left_alone"
        return self.error.label if self.error is not None else f"status_{self.answer.status if self.answer else 0}"


def retry_of_status(status: int) -> Retry | None:
    """Where a request may be sent after an answer with this status; None for one that counts."""
    if status in _REFUSED:
        return Retry.ANYWHERE
    return Retry.ELSEWHERE if status >= 500 and status != _NOT_IMPLEMENTED else None


def is_fault(status: int) -> bool:
    """Whether the status shows that the upstream is ill. A tenant's own limit or request may be why others came."""
    return retry_of_status(status) is not None and status not in _NOT_ITS_FAULT


def retry_after(answer: UpstreamResponse) -> float | None:
    """The seconds of its Retry-After (RFC 9110, section 10.2.3), a number or a date; None without a valid one."""
    text = answer.headers.get("Retry-After", "").strip()
    try:
        seconds = (
            float(text) if text[:1].isdigit() else email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        )
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def outcome(
    failures: Sequence[Failure], of_first: int, lacks: bool, otherwise: GatewayError | None
) -> UpstreamResponse:
    """The last answer there was to the first model, of which the first `of_first` failures are, though it is an error.
    With none, raises `otherwise` if some upstream `lacks` what the request needs, else one error that names all
    failures: that the deadline has ended, else that an upstream is busy, else what happened last.
    """
    for failure in reversed(failures[:of_first]):
        if failure.answer is not None:
            return failure.answer
    if lacks and otherwise is not None:
        raise otherwise
    errors = [failure.error for failure in failures if failure.error is not None]
    message = " ".join(dict.fromkeys(failure.message for failure in failures))
    if late := [error for error in errors if isinstance(error, DeadlineExceeded)]:
        raise DeadlineExceeded(message) from late[-1]
    if busy := [error for error in errors if isinstance(error, TooManyRequests)]:
        raise TooManyRequests(message, retry_after=min(error.retry_after for error in busy)) from busy[-1]
    others = [error for error in errors if not isinstance(error, NoUpstream)]
    if others:
        raise type(others[-1])(message, code=others[-1].code) from others[-1]
    waits = [error.retry_after for error in errors if isinstance(error, NoUpstream)]
    if waits:
        raise NoUpstream(message, retry_after=min(waits))
    raise UpstreamUnreachable(message or "No upstream could be asked.")
