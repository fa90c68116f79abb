"""What is known of a request: made when it arrives, filled in along its way, told when it has ended."""

import asyncio
import itertools
import re
import secrets
from collections.abc import Mapping, MutableMapping

import msgspec
from aiohttp import web
from multidict import istr

from telemetry.logs import CURRENT_REQUEST
from telemetry.tracing.span import NO_SPAN, Span
from telemetry.tracing.timed import timings_of

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID_NAME = istr(REQUEST_ID_HEADER)  # looked up twice as fast as a plain string
UPSTREAM_REQUEST_ID_HEADER = "x-keepgate-upstream-request-id"

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Of this process; a random number for each request would cost more than all else that is done for its id.
_PREFIX = secrets.token_hex(6)
_numbers = itertools.count(1)


class RequestRecord(msgspec.Struct):
    """One request. Times are those of `time.monotonic()`, in seconds; what is "", 0 or None is not known.

    Nothing of it is a prompt, an answer or a credential.
    """

    request_id: str
    method: str
    path: str
    """Without the query, as it was sent."""
    began: float
    ended: float = 0.0
    span: Span = NO_SPAN
    """Of the whole request."""
    route: str = ""
    """The pattern of the path: a name of few, "" if it is none of the gateway's."""
    family: str = ""
    """The form of API, for requests for an answer."""
    status: int = 0
    stream: bool = False
    model: str = ""
    key: str = ""
    """The id of the virtual key."""
    team: str = ""
    namespace: str = ""
    """Of the caller."""
    cache: str = ""
    """hit, miss, bypass or failed."""
    layer: str = ""
    reason: str = ""
    """Why the cache was not asked, or did not answer."""
    entry: str = ""
    """The id of the answer's entry, where it is stored or may be."""
    upstream: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    prediction: str = ""
    """Which stored answer the upstream was sent as prediction: stale or neighbour."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cost: float | None = None
    """In US dollars."""
    saving: float | None = None
    estimated: bool = False
    """Whether tokens and cost are, since the upstream has not said them, as of an answer that was broken off."""
    saved_seconds: float = 0.0
    """How long the answer took to compute that was not computed again."""
    first_byte_at: float = 0.0
    """When the first byte of the answer's body was sent."""
    bytes: int = 0
    """Of the answer's body."""
    error: str = ""
    """The code of the error with which it ended."""
    ends_with: asyncio.Task[None] | None = None
    """What completes the record, of a client that has left before the answer that it pays for has ended."""

    @property
    def trace_id(self) -> str:
        return self.span.trace_id


RECORD = web.RequestKey("record", RequestRecord)


def current_record() -> RequestRecord | None:
    """The record of the request that the running task works for, or was started by."""
    record = CURRENT_REQUEST.get()
    return record if isinstance(record, RequestRecord) else None


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's own id of its request if it is 1 to 128 of A-Z, a-z, 0-9, `.`, `_` and `-`; else a new one."""
    given = headers.get(_REQUEST_ID_NAME)
    if given is not None and _SANE_ID.fullmatch(given):
        return given
    return f"{_PREFIX}-{next(_numbers):x}"


def name_response(headers: MutableMapping[str, str], record: RequestRecord) -> None:
    """Give a response the id of its request, and its durations if it asked for them.

    An upstream's own id stays under another name.
    """
    if (theirs := headers.get(REQUEST_ID_HEADER)) is not None and theirs != record.request_id:
        headers[UPSTREAM_REQUEST_ID_HEADER] = theirs
    headers[REQUEST_ID_HEADER] = record.request_id
    if (timings := timings_of(record.span)) is not None:
        timings.tell(headers)
