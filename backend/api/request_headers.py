"""What the head of a request says of its caller: how long it waits, and whose it is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from aiohttp import web

from backend.api.http_body import ARRIVED
from backend.api.server_state import STATE
from backend.engine.sequence import Sequence
from backend.errors import InvalidRequest
from prefix_store.identity.keys import KeyChain

_TIMEOUT_HEADER = "x-request-timeout"
_LONGEST_TIMEOUT = 86_400.0
_REUSE_HEADER = "x-keepgate-reuse"
_REUSES = ("conversation", "one-shot")
_TELL_TENANTS = ("Authorization", "x-api-key", "api-key", "x-keepgate-namespace")


def set_deadline(request: web.Request, sequences: Iterable[Sequence]) -> None:
    """Sets how long the caller, or the server for all, waits: from when the request's head had been read.

    So the time that its body takes to arrive and to be read counts, as it does on the caller's own clock.

    Raises:
        InvalidRequest: names the header.
    """
    seconds = min(_asked_seconds(request), request.app[STATE].max_seconds or math.inf)
    if seconds < math.inf:
        deadline = request[ARRIVED] + seconds
        for sequence in sequences:
            sequence.deadline = deadline


def tenant_keys(request: web.Request) -> KeyChain:
    """Keys under which a caller's KV blocks are kept, so that one tenant's are not another's.

    Who shared them could tell by time, and by usage, what has been asked before. Tenants are told apart by the
    credentials that came with the request, as a gateway passes them on, and by the namespace that a gateway gives them.
    """
    given = [f"{name}:{value}" for name in _TELL_TENANTS for value in request.headers.getall(name, ())]
    return request.app[STATE].tenants.keys(given)


def is_one_shot(request: web.Request, default: bool) -> bool:
    """Whether no conversation will follow, so that what was computed is kept when it is used a second time.

    Raises:
        InvalidRequest: names the header.
    """
    value = request.headers.get(_REUSE_HEADER)
    if value is None:
        return default
    if value not in _REUSES:
        raise InvalidRequest(f"{_REUSE_HEADER}: expected {' or '.join(_REUSES)}", _REUSE_HEADER)
    return value == "one-shot"


def _asked_seconds(request: web.Request) -> float:
    value = request.headers.get(_TIMEOUT_HEADER)
    if value is None:
        return math.inf
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise InvalidRequest(
            f"{_TIMEOUT_HEADER}: expected seconds, more than 0 and at most {_LONGEST_TIMEOUT:.0f}", _TIMEOUT_HEADER
        )
    return seconds
