"""Records in Redis, and a stream of changes, by which all processes share what they learn at once.

keepgate:semantic:record:<entry>   a record and its vector, until the answer expires
keepgate:semantic:records          sorted set of all entries, by the time at which they expire
keepgate:semantic:log              stream: put, remove, confirm, wrong and label, in the order in which all see them
keepgate:semantic:policy:<name>    a policy's state, and its position in the stream
"""

import asyncio
import functools
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from cache.errors import CorruptEntry, StoreUnavailable
from cache.semantic.service.neighbours import Vector
from cache.semantic.service.record_format import RecordFormat
from cache.semantic.service.records import Record
from cache.stores.breaker import Breaker

log = logging.getLogger(__name__)

_RECORD = "keepgate:semantic:record:"
_RECORDS = "keepgate:semantic:records"
_LOG = "keepgate:semantic:log"
_POLICY = "keepgate:semantic:policy:"
_EVENTS_KEPT = 100_000
_EVENTS_AT_ONCE = 500
_RECORDS_AT_ONCE = 256
_POLL_MILLISECONDS = 2_000
_DEADLINE = 5.0
_MAX_WAITING = 20_000
_WRITES_PER_BATCH = 128
_PAUSE = 0.5
_POSITION = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")
_MAX_DIGITS = 18
# Keeps the state of the later stream position; replaces a value that is no state.
_KEEP_NEWEST = """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('DEL', KEYS[1]) end
local function parts(id) local a, b = string.match(id, '^(%d+)-(%d+)$'); return tonumber(a), tonumber(b) end
local known = redis.call('HGET', KEYS[1], 'position')
if known then
  local a, b = parts(known)
  local c, d = parts(ARGV[1])
  if a and (a > c or (a == c and b >= d)) then return 0 end
end
redis.call('HSET', KEYS[1], 'position', ARGV[1], 'state', ARGV[2])
return 1
"""

Command = tuple[str | bytes | int | float, ...]


class _Write(NamedTuple):
    """A command, and what to do if Redis refuses it."""

    command: Command
    lost: Callable[[], None]


class Event(NamedTuple):
    """An action of a process, at a position of the stream; `data` is an entry's id, or depends on the kind.

    `number` counts the events of its origin.
    """

    position: str
    origin: str
    number: int
    kind: str
    data: bytes


_encode = msgspec.msgpack.Encoder().encode


class RecordLog:
    """This process's access to the shared records. No request waits for it."""

    def __init__(self, client: "redis.asyncio.Redis", origin: str, record_format: RecordFormat) -> None:
        self._client = client
        self.origin = origin
        self._format = record_format
        self._waiting: deque[_Write] = deque()
        self._number = 0
        self._has_waiting = asyncio.Event()
        self._keep_newest = client.register_script(_KEEP_NEWEST)
        self.breaker = Breaker("redis (semantic)", self._ping, (RedisError,), _DEADLINE)
        self.dropped = 0
        self.corrupt = 0

    def save(self, record: Record, vector: Vector) -> None:
        if self._set(record, vector):
            self._write("ZADD", _RECORDS, record.expires, record.entry)
            self._announce("put", record.entry.encode())

    def remove(self, entry: str) -> None:
        self._write("UNLINK", _RECORD + entry)
        self._write("ZREM", _RECORDS, entry)
        self._announce("remove", entry.encode())

    def discard(self, entries: Sequence[str]) -> None:
        """Remove records without an announcement."""
        self._write("UNLINK", *(_RECORD + entry for entry in entries))
        self._write("ZREM", _RECORDS, *entries)

    def confirm(self, record: Record, vector: Vector, namespace: str) -> None:
        """Stores a record that a tenant has confirmed, for later processes, and publishes the tenant."""
        if self._set(record, vector, "XX"):  # not if it was removed meanwhile
            self._announce("confirm", _encode((record.entry, record.created, namespace)))

    def wrong(self, entry: str) -> None:
        """Publishes that an answer served from an entry was wrong."""
        self._announce("wrong", entry.encode())

    def publish(self, label: bytes, lost: Callable[[], None]) -> bool:
        """Whether the label will reach all processes, this one included, in one order.

        `lost` is called if Redis refuses it later.
        """
        if self.breaker.is_open:
            return False
        self._announce("label", label, lost)
        return True

    async def make_room(self) -> None:
        """Removes values of a wrong type at the keys of ids and events. Raises StoreUnavailable."""
        for key, kind in ((_RECORDS, b"zset"), (_LOG, b"stream")):
            found = await self._call(functools.partial(self._client.type, key))
            if found not in (kind, b"none"):
                log.warning("removing %s from redis: it is a %s and should be a %s", key, _text(found), _text(kind))
                await self._call(functools.partial(self._client.unlink, key))

    async def load(self) -> AsyncIterator[list[tuple[Record, Vector | None]]]:
        """All records, some hundreds at a time; without a vector if it is of another model."""
        cursor = 0
        while True:
            page = functools.partial(self._client.zscan, _RECORDS, cursor, count=_RECORDS_AT_ONCE)
            cursor, found = await self._call(page)
            yield await self.records([entry.decode(errors="replace") for entry, _ in found])
            if cursor == 0:
                return

    async def records(self, entries: Sequence[str]) -> list[tuple[Record, Vector | None]]:
        """Those of these records that exist and are valid. Raises StoreUnavailable."""
        if not entries:
            return []
        stored = await self._call(lambda: self._client.mget([_RECORD + entry for entry in entries]))
        sound: list[tuple[Record, Vector | None]] = []
        for entry, data in zip(entries, stored, strict=True):
            try:
                if data is not None:
                    sound.append(self._format.decode(entry, data))
            except CorruptEntry as error:
                self.corrupt += 1
                log.warning("ignoring the record of %s in redis: %s", entry, error)
        return sound

    async def newest(self) -> str:
        """The position of the newest event. Raises StoreUnavailable."""
        newest = await self._call(lambda: self._client.xrevrange(_LOG, count=1))
        return _text(newest[0][0]) if newest else "0-0"

    async def since(self, position: str) -> list[Event]:
        """Wait for events after a position, for two seconds at most. Raises StoreUnavailable."""
        read = await self._call(
            lambda: self._client.xread({_LOG: position}, count=_EVENTS_AT_ONCE, block=_POLL_MILLISECONDS),
            _DEADLINE + _POLL_MILLISECONDS / 1000,
        )
        return [_event(place, fields) for _, items in read or () for place, fields in items]

    async def learned(self, name: str) -> tuple[str, bytes] | None:
        """A policy's newest state, and the position up to which it has seen the stream. Raises StoreUnavailable."""
        kept = await self._call(lambda: self._hash(_POLICY + name))
        position = kept.get(b"position", b"")
        return (_text(position), kept[b"state"]) if b"state" in kept and _POSITION.fullmatch(position) else None

    async def keep_learned(self, name: str, position: str, state: bytes) -> None:
        """Stores a policy's state, unless a later one is there. Raises StoreUnavailable."""
        await self._call(lambda: self._keep_newest(keys=[_POLICY + name], args=[position, state]))

    async def sweep(self) -> None:
        """Removes the ids of expired entries. Raises StoreUnavailable."""
        await self._call(lambda: self._client.zremrangebyscore(_RECORDS, "-inf", time.time()))

    async def write(self) -> None:
        """Write what is waiting, in order; runs for as long as the log is used."""
        while True:
            await self._has_waiting.wait()
            try:
                await self._write_batch()
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE)
                await self.breaker.wait_closed()

    async def flush(self) -> None:
        """Write everything now. Raises StoreUnavailable."""
        while self._waiting:
            await self._write_batch()

    async def _write_batch(self) -> None:
        batch = list(itertools.islice(self._waiting, _WRITES_PER_BATCH))
        pipeline = self._client.pipeline(transaction=False)
        for write in batch:
            pipeline.execute_command(*write.command)
        replies = await self._call(lambda: pipeline.execute(raise_on_error=False))
        for _ in batch:
            self._waiting.popleft()
        if not self._waiting:
            self._has_waiting.clear()
        refused = [
            (write, reply) for write, reply in zip(batch, replies, strict=True) if isinstance(reply, ResponseError)
        ]
        for write, _ in refused:
            write.lost()
        if refused:
            self.dropped += len(refused)
            log.warning("redis refused %d of %d writes: %s", len(refused), len(batch), refused[0][1])

    def _announce(self, kind: str, data: bytes, lost: Callable[[], None] = lambda: None) -> None:
        # The number identifies an event that was written twice because the first reply was lost.
        self._number += 1
        fields = ("origin", self.origin, "number", self._number, "kind", kind, "data", data)
        self._write("XADD", _LOG, "MAXLEN", "~", _EVENTS_KEPT, "*", *fields, lost=lost)

    def _set(self, record: Record, vector: Vector, *condition: str) -> bool:
        """False if it has expired."""
        remaining = round((record.expires - time.time()) * 1000)
        if remaining > 0:
            self._write("SET", _RECORD + record.entry, self._format.encode(record, vector), "PX", remaining, *condition)
        return remaining > 0

    def _write(self, *command: str | bytes | int | float, lost: Callable[[], None] = lambda: None) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            self.dropped += 1
            lost()
            return
        self._waiting.append(_Write(command, lost))
        self._has_waiting.set()

    async def _hash(self, key: str) -> dict[bytes, bytes]:
        """Empty also if the key has another type: Redis can still be used."""
        try:
            return cast(dict[bytes, bytes], await self._client.hgetall(key))
        except ResponseError as error:
            if not str(error).startswith("WRONGTYPE"):
                raise
            log.warning("beginning anew: %s in redis is not the hash that it should be", key)
            return {}

    async def _ping(self) -> None:
        try:
            await self._client.ping()
        except RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    async def _call(self, operation: Callable[[], Awaitable[Any]], deadline: float = _DEADLINE) -> Any:
        return await self.breaker.call(operation, deadline)


def _text(reply: Any) -> str:
    return cast(bytes, reply).decode()


def _event(position: bytes, fields: dict[bytes, bytes]) -> Event:
    origin, kind = (fields.get(name, b"").decode(errors="replace") for name in (b"origin", b"kind"))
    number = fields.get(b"number", b"")
    is_number = number.isdigit() and len(number) <= _MAX_DIGITS
    return Event(_text(position), origin, int(number) if is_number else 0, kind, fields.get(b"data", b""))
