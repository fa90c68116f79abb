"""Deadlines of requests: times of the event loop, None where only the settings have one."""

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

from multidict import CIMultiDictProxy

from gateway.errors import DeadlineExceeded, InvalidRequest
from gateway.upstreams.upstream import TIMEOUT_HEADER

T = TypeVar("T")

_MAX_TIMEOUT = 86_400.0
# Requests that come at the same time with the same timeout share a call, which ends a little too early for the last.
_ABOUT = 1.1


def timeout_of(headers: CIMultiDictProxy[str]) -> float | None:
    """The seconds that a client gives for a whole answer, if it says so. Raises InvalidRequest."""
    given = headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT:
        raise InvalidRequest(f"'{TIMEOUT_HEADER}' must be seconds, more than 0 and at most {_MAX_TIMEOUT:.0f}.")
    return seconds


def deadline_in(timeout: float | None) -> float | None:
    """The deadline of a request that has so many seconds from now."""
    return None if timeout is None else asyncio.get_running_loop().time() + timeout


def outlasts(deadline: float | None, other: float | None) -> bool:
    """Whether what ends at `deadline` goes on for about as long as a request with the `other` one wants to wait."""
    if deadline is None:
        return True
    if other is None:
        return False
    now = asyncio.get_running_loop().time()
    return other - now <= (deadline - now) * _ABOUT


async def wait_until(deadline: float | None, waiting: Awaitable[T]) -> T:
    """The result, for which is waited until the deadline at most. Raises DeadlineExceeded."""
    if deadline is None:
        return await waiting
    try:
        async with asyncio.timeout_at(deadline):
            return await waiting
    except TimeoutError as error:
        raise DeadlineExceeded("The deadline of the request ended before its answer did.") from error
