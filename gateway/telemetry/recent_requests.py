"""The requests that ended a moment ago, of all processes that share a Redis: what became of each, and no text of it."""

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

import msgspec

from cache.errors import StoreUnavailable
from cache.stores.redis_store import RedisStore
from gateway.telemetry.record import RequestRecord
from telemetry.tracing.timed import Timings, timings_of

_KEY = "keepgate:requests"
_KEPT = 500
"""In Redis, or in this process without one."""
_PER_FLUSH = 100
_FLUSH_SECONDS = 1.0
_DEADLINE = 2.0
_MAX_TEXT = 200


class RecentRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request for an answer. `time` is when it ended, Unix seconds; `first_byte` and `seconds` count from its begin.

    `cache` is hit, miss, bypass or failed, and left out for one that was refused before; `layer` is that of a hit, or
    flight where it shared the upstream call of another one.
    """

    time: float
    id: str
    path: str
    status: int
    seconds: float
    family: str
    model: str
    cache: str = ""
    layer: str = ""
    stream: bool = False
    reason: str = ""
    """Why the cache was not asked, or did not answer."""
    entry: str = ""
    """The id of the answer's entry, where it is stored or may be."""
    key: str = ""
    team: str = ""
    namespace: str = ""
    upstream: str = ""
    first_byte: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prediction: str = ""
    """Which stored answer the upstream was sent as prediction: stale or neighbour."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    cost: float | None = None
    saving: float | None = None
    estimated: bool = False
    """Whether tokens and cost are, since the upstream has not said them, as of an answer that was broken off."""
    error: str = ""
    timings: dict[str, float] = {}
    """Seconds by part, of a request with `x-keepgate-profile`."""


_COPIED = (
    "status",
    "cache",
    "layer",
    "stream",
    "reason",
    "entry",
    "key",
    "team",
    "namespace",
    "prompt_tokens",
    "completion_tokens",
    "prediction",
    "accepted_prediction_tokens",
    "rejected_prediction_tokens",
    "estimated",
)
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(RecentRequest).decode


class RecentRequests:
    """Keeps the last ones; of more than a hundred in a second and a process, the last hundred. The caller runs
    `flush_forever`.
    """

    def __init__(self, redis: RedisStore | None) -> None:
        self._redis = redis
        self._waiting: deque[RequestRecord] = deque(maxlen=_PER_FLUSH)
        self.note = self._waiting.append
        """Takes the record of a request that has ended; it is read when it is written."""
        self._kept: deque[RecentRequest] = deque(maxlen=_KEPT)

    async def flush_forever(self) -> None:
        """Write each second what has ended. What a Redis that is away does not take is given up."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            with contextlib.suppress(StoreUnavailable):
                await self.flush()

    async def flush(self) -> None:
        """Raises StoreUnavailable."""
        wall_clock_offset = time.time() - time.monotonic()
        waiting = [_told(record, wall_clock_offset + record.ended) for record in self._waiting]
        self._waiting.clear()
        if self._redis is None:
            self._kept.extend(waiting)
        elif waiting:
            await self._redis.commands(
                [("LPUSH", _KEY, *map(_encode, waiting)), ("LTRIM", _KEY, 0, _KEPT - 1)], _DEADLINE
            )

    async def latest(self) -> list[RecentRequest]:
        """The last ones, the newest first. Raises StoreUnavailable."""
        await self.flush()
        if self._redis is None:
            return list(self._kept)[::-1]
        found = []
        for data in await self._redis.command(("LRANGE", _KEY, 0, _KEPT - 1), _DEADLINE):
            with contextlib.suppress(msgspec.DecodeError):  # not written by this version
                found.append(_decode(data))
        return sorted(found, key=lambda each: -each.time)


def _told(record: RequestRecord, ended: float) -> RecentRequest:
    """`ended` in Unix seconds."""

    def short(text: str) -> str:
        return text[:_MAX_TEXT]

    fields: dict[str, Any] = {name: getattr(record, name) for name in _COPIED}
    return RecentRequest(
        time=round(ended, 3),
        id=record.request_id,
        path=short(record.path),
        seconds=round(record.ended - record.began, 6),
        family=record.family,
        model=short(record.model),
        upstream=short(record.upstream),
        first_byte=round(record.first_byte_at - record.began, 6) if record.first_byte_at else None,
        cost=record.cost,
        saving=record.saving,
        error=record.error,
        timings=_rounded(timings_of(record.span)),
        **fields,
    )


def _rounded(timings: Timings | None) -> dict[str, float]:
    return {} if timings is None else {name: round(seconds, 6) for name, seconds in timings.seconds.items()}
