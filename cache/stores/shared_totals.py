"""Sums that all processes add to: kept in this process, and each second added to those in Redis.

A bucket, such as an hour, is a hash of integers. A field's name is the JSON array of the names by which a sum is kept
and of its counter, so no name can break it. A batch has a number, and its bucket remembers the last number of each
process: a batch that is sent again after a lost reply counts once (docs/decisions/028-costs.md).
"""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

from cache.errors import StoreUnavailable
from cache.stores.redis_connections import Command
from cache.stores.redis_store import RedisStore

log = logging.getLogger(__name__)

Names = tuple[str, ...]
Totals = dict[Names, list[int]]
"""Integers in the order of the counters."""

_FLUSH_SECONDS = 1.0
_DEADLINE = 2.0
_MAX_TOTALS = 50_000
_FIELDS_PER_BATCH = 2_000
_LARGE = 1_000
# KEYS: a bucket. ARGV: process, number of the batch, seconds to keep the bucket (0: for ever), then fields and what is
# added to them.
_ADD = """
local last = redis.call('HGET', KEYS[1], ARGV[1])
if last and tonumber(last) >= tonumber(ARGV[2]) then return 0 end
for i = 4, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
if ARGV[3] ~= '0' then redis.call('EXPIRE', KEYS[1], ARGV[3]) end
return 1
"""


class Bucket(NamedTuple):
    """A set of sums. It is forgotten `keep` seconds after the last addition; 0 is never."""

    name: str
    keep: int = 0


class _Batch(NamedTuple):
    bucket: Bucket
    number: int
    parts: list[str | int]


class SharedTotals:
    """Sums under `keepgate:<title>:<bucket>`. Without Redis they are those of this process alone."""

    def __init__(
        self,
        redis: RedisStore | None,
        title: str,
        dimensions: Sequence[str],
        counters: Sequence[str],
        folded: Callable[[Names], Names],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`dimensions` say what the names of a sum stand for; `folded` gives the names under which a sum is added when
        50,000 wait to be written.
        """
        self._redis = redis
        self.title = title
        self._dimensions = tuple(dimensions)
        self._counters = tuple(counters)
        self._places = {name: place for place, name in enumerate(counters)}
        self._folded = folded
        self._clock = clock
        self._buckets: dict[Bucket, Totals] = {}  # with Redis: what it does not have yet
        self._added: dict[Bucket, float] = {}
        self._size = 0
        self._process = f"process {secrets.token_hex(8)}"
        self._batches = 0
        self._unsent: _Batch | None = None
        self._flushing = asyncio.Lock()
        self._is_failing = False

    def add(self, bucket: Bucket, names: Names, counts: Iterable[int]) -> None:
        """Add to the sums of these names, in the order of the counters."""
        totals = self._buckets.setdefault(bucket, {})
        self._added[bucket] = self._clock()
        if names not in totals and self._size >= _MAX_TOTALS:
            names = self._folded(names)
        if names not in totals:
            totals[names] = [0] * len(self._counters)
            self._size += 1
        sums = totals[names]
        for place, count in enumerate(counts):
            sums[place] += count

    def forget_old(self) -> None:
        """Forget the buckets whose time is over."""
        now = self._clock()
        for bucket in [each for each, added in self._added.items() if each.keep and now - added > each.keep]:
            self._forget(bucket)

    def _forget(self, bucket: Bucket) -> None:
        self._size -= len(self._buckets.pop(bucket))
        del self._added[bucket]

    async def flush_forever(self, collect: Callable[[], None]) -> None:
        """Collect and flush each second. A Redis that does not take a batch gets it again."""
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            collect()
            try:
                await self.flush()
                self._is_failing = False
            except StoreUnavailable as error:
                if not self._is_failing:
                    log.warning("%s wait to be written: %s", self.title, error)
                self._is_failing = True

    async def flush(self) -> None:
        """Add to Redis what it does not have yet. Raises StoreUnavailable; then nothing is lost."""
        self.forget_old()
        if self._redis is None:
            return
        async with self._flushing:
            while (batch := self._next_batch()) is not None:
                bucket, number, parts = batch
                command: Command = ("EVAL", _ADD, 1, self._key(bucket.name), self._process, number, bucket.keep, *parts)
                await self._redis.command(command, _DEADLINE)
                self._unsent = None

    def _next_batch(self) -> _Batch | None:
        """The batch that Redis may or may not have taken, else one of the oldest bucket; None if all is there."""
        if self._unsent is not None or not self._buckets:
            return self._unsent
        bucket = next(iter(self._buckets))
        totals = self._buckets[bucket]
        parts: list[str | int] = []
        while totals and len(parts) < 2 * _FIELDS_PER_BATCH:
            names, counts = totals.popitem()
            self._size -= 1
            for counter, count in zip(self._counters, counts, strict=True):
                if count:
                    parts += (json.dumps([*names, counter]), count)
        if not totals:
            self._forget(bucket)
        self._batches += 1
        self._unsent = _Batch(bucket, self._batches, parts)
        return self._unsent

    async def read(self, bucket: str) -> Totals:
        """The sums of a bucket; with Redis those that it has. Raises StoreUnavailable."""
        (found,) = await self.read_all([bucket])
        return found

    async def read_all(self, buckets: Sequence[str]) -> list[Totals]:
        """The sums of several buckets. Raises StoreUnavailable."""
        if self._redis is None:
            kept = {bucket.name: totals for bucket, totals in self._buckets.items()}
            return [kept.get(bucket, {}) for bucket in buckets]
        replies = await self._redis.commands([("HGETALL", self._key(bucket)) for bucket in buckets], _DEADLINE)
        for reply in replies:
            if isinstance(reply, Exception):
                raise StoreUnavailable(f"redis: {reply}") from reply
        if sum(map(len, replies)) > _LARGE:
            return await asyncio.to_thread(lambda: list(map(self._decoded, replies)))
        return list(map(self._decoded, replies))

    def _key(self, bucket: str) -> str:
        return f"keepgate:{self.title}:{bucket}"

    def _decoded(self, fields: Any) -> Totals:
        """The reply to HGETALL, a list in RESP2 and a map in RESP3; what is no counter here is passed over."""
        pairs = fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
        totals: Totals = {}
        for field, count in pairs:
            with contextlib.suppress(msgspec.DecodeError, ValueError, KeyError):
                *names, counter = _decode_field(field)
                if len(names) == len(self._dimensions):
                    totals.setdefault(tuple(names), [0] * len(self._counters))[self._places[counter]] += int(count)
        return totals


@asynccontextmanager
async def writing_at_the_end(totals: SharedTotals, collect: Callable[[], None]) -> AsyncIterator[None]:
    """At the end of the block, write what is left."""
    try:
        yield
    finally:
        collect()
        try:
            await totals.flush()
        except StoreUnavailable as error:
            log.warning("%s of the last moments were not written to redis: %s", totals.title, error)


_decode_field = msgspec.json.Decoder(list[str]).decode
