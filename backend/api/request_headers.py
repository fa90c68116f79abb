"""The headers of a request that concern its processing: deadline, tenant and expected reuse of the prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable

from aiohttp import web

from backend.api.http_body import RECEIVED_AT
from backend.api.server_state import STATE
from backend.engine.sequence import Sequence
from backend.errors import InvalidRequest
from prefix_store.identity.keys import KeyChain

_TIMEOUT_HEADER = "x-request-timeout"
_MAX_TIMEOUT_SECONDS = 86_400.0
_REUSE_HEADER = "x-keepgate-reuse"
_REUSE_VALUES = ("conversation", "one-shot")
_TENANT_HEADERS = ("Authorization", "x-api-key", "api-key", "x-keepgate-namespace")


def set_deadline(request: web.Request, sequences: Iterable[Sequence]) -> None:
    """Sets the deadline of the sequences: the caller's timeout or the server's, whichever is shorter.

    The time counts from the arrival of the request's head, as on the caller's clock, so it includes reading the body.

    Raises:
        InvalidRequest: names the header.
    """
    seconds = min(_timeout_seconds(request), request.app[STATE].max_seconds or math.inf)
    if seconds < math.inf:
        deadline = request[RECEIVED_AT] + seconds
        for sequence in sequences:
            sequence.deadline = deadline


def tenant_keys(request: web.Request, cache_salt: str = "") -> KeyChain:
    """The keys of the caller's KV blocks, which no other tenant shares.

    Shared blocks would reveal, by latency and usage, what other tenants have asked. A tenant is identified by the
    credentials that a gateway forwards, by the namespace that a gateway sets, and by the request's own ``cache_salt``.
    """
    identity = [f"{name}:{value}" for name in _TENANT_HEADERS for value in request.headers.getall(name, ())]
    if cache_salt:
        identity.append(f"cache_salt:{cache_salt}")
    return request.app[STATE].tenants.keys(identity)


def is_one_shot(request: web.Request, default: bool) -> bool:
    """Whether no follow-up is expected, so that KV blocks are stored only at their second use.

    Raises:
        InvalidRequest: names the header.
    """
    value = request.headers.get(_REUSE_HEADER)
    if value is None:
        return default
    if value not in _REUSE_VALUES:
        raise InvalidRequest(f"{_REUSE_HEADER}: expected {' or '.join(_REUSE_VALUES)}", _REUSE_HEADER)
    return value == "one-shot"


def _timeout_seconds(request: web.Request) -> float:
    value = request.headers.get(_TIMEOUT_HEADER)
    if value is None:
        return math.inf
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        raise InvalidRequest(
            f"{_TIMEOUT_HEADER}: expected seconds, more than 0 and at most {_MAX_TIMEOUT_SECONDS:.0f}", _TIMEOUT_HEADER
        )
    return seconds
