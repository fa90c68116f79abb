"""Records in Redis, and a stream of changes, by which all processes share what they learn at once.

keepgate:semantic:record:<entry>   a record and its vector, until the answer expires
keepgate:semantic:records          sorted set of all entries, by the time at which they expire
keepgate:semantic:log              stream: put, remove, confirm, wrong and label, in the order in which all see them
keepgate:semantic:policy:<name>    a policy's state, and its position in the stream
"""

import asyncio
import itertools
import logging
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from redis.exceptions import RedisError

from cache.errors import CorruptEntry, StoreUnavailable, Undecryptable
from cache.semantic.service.neighbours import Vector
from cache.semantic.service.record_format import RecordFormat
from cache.semantic.service.records import Record
from cache.stores.breaker import Breaker
from cache.stores.encryption import Encryption
from cache.stores.redis_connections import Command
from cache.stores.redis_replies import Fields, pairs, range_items, stream_items
from cache.stores.topology import Topology

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

    def __init__(self, topology: Topology, origin: str, record_format: RecordFormat, encryption: Encryption) -> None:
        self._topology = topology
        self._encryption = encryption
        self.origin = origin
        self._format = record_format
        self._waiting: deque[_Write] = deque()
        self._number = 0
        self._has_waiting = asyncio.Event()
        self.breaker = Breaker("redis (semantic)", self._ping, (RedisError,), _DEADLINE)
        self.dropped = 0
        self.corrupt = 0

    def save(self, record: Record, vector: Vector) -> None:
        if self._set(record, vector):
            self._write("ZADD", _RECORDS, record.expires, record.entry)
            self._announce("put", record.entry.encode())

    def complete(self, record: Record, vector: Vector) -> None:
        """Stores the vector of a record, unless that was removed meanwhile."""
        self._set(record, vector, "XX")

    def remove(self, entry: str) -> None:
        self._write("UNLINK", _RECORD + entry)
        self._write("ZREM", _RECORDS, entry)
        self._announce("remove", entry.encode())

    def discard(self, entries: Sequence[str]) -> None:
        """Remove records without an announcement."""
        for entry in entries:
            self._write("UNLINK", _RECORD + entry)
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
            found = await self._ask(("TYPE", key))
            if found not in (kind, b"none"):
                log.warning("removing %s from redis: it is a %s and should be a %s", key, found.decode(), kind.decode())
                await self._ask(("UNLINK", key))

    async def load(self) -> AsyncIterator[list[tuple[Record, Vector | None]]]:
        """All records, some hundreds at a time; without a vector if it is of another model."""
        cursor = b"0"
        while True:
            cursor, found = await self._ask(("ZSCAN", _RECORDS, cursor, "COUNT", _RECORDS_AT_ONCE))
            yield await self.records([entry.decode(errors="replace") for entry in found[::2]])
            if cursor == b"0":
                return

    async def records(self, entries: Sequence[str]) -> list[tuple[Record, Vector | None]]:
        """Those of these records that exist and are valid. Raises StoreUnavailable."""
        if not entries:
            return []
        reads: list[Command] = [("GET", _RECORD + entry) for entry in entries]
        stored = await self._call(lambda: self._topology.ask(*reads))
        sound: list[tuple[Record, Vector | None]] = []
        for entry, data in zip(entries, stored, strict=True):
            try:
                if isinstance(data, bytes):
                    sound.append(self._format.decode(entry, await self._encryption.open(_RECORD + entry, data)))
            except (CorruptEntry, Undecryptable) as error:
                self.corrupt += 1
                log.warning("ignoring the record of %s in redis: %s", entry, error)
        return sound

    async def newest(self) -> str:
        """The position of the newest event. Raises StoreUnavailable."""
        newest = range_items(await self._ask(("XREVRANGE", _LOG, "+", "-", "COUNT", 1)))
        return newest[0][0] if newest else "0-0"

    async def since(self, position: str) -> list[Event]:
        """Wait for events after a position, for two seconds at most. Raises StoreUnavailable."""
        command: Command = ("XREAD", "COUNT", _EVENTS_AT_ONCE, "BLOCK", _POLL_MILLISECONDS, "STREAMS", _LOG, position)
        read = await self._ask(command, _DEADLINE + _POLL_MILLISECONDS / 1000)
        return [_event(place, fields) for place, fields in stream_items(read)]

    async def learned(self, name: str) -> tuple[str, bytes] | None:
        """A policy's newest state, and the position up to which it has seen the stream. Raises StoreUnavailable."""
        kept = await self._hash(_POLICY + name)
        position = kept.get(b"position", b"")
        return (position.decode(), kept[b"state"]) if b"state" in kept and _POSITION.fullmatch(position) else None

    async def keep_learned(self, name: str, position: str, state: bytes) -> None:
        """Stores a policy's state, unless a later one is there. Raises StoreUnavailable."""
        await self._ask(("EVAL", _KEEP_NEWEST, 1, _POLICY + name, position, state))

    async def sweep(self) -> None:
        """Removes the ids of expired entries. Raises StoreUnavailable."""
        await self._ask(("ZREMRANGEBYSCORE", _RECORDS, "-inf", time.time()))

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
        """Events after everything else: another server may have what they are about."""
        batch = list(itertools.islice(self._waiting, _WRITES_PER_BATCH))
        commands = [await self._sealed(write.command) for write in batch]
        replies: list[Any] = [None] * len(batch)
        for are_events in (False, True):
            numbers = [n for n, command in enumerate(commands) if (command[0] == "XADD") is are_events]
            part = [commands[number] for number in numbers]
            answers = await self._call(lambda part=part: self._topology.ask(*part)) if part else []  # type: ignore[misc]
            for number, reply in zip(numbers, answers, strict=True):
                replies[number] = reply
        for _ in batch:
            self._waiting.popleft()
        if not self._waiting:
            self._has_waiting.clear()
        refused = [(write, reply) for write, reply in zip(batch, replies, strict=True) if isinstance(reply, RedisError)]
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

    async def _sealed(self, command: Command) -> Command:
        if command[0] != "SET":
            return command
        _, key, value, *rest = command
        return "SET", key, await self._encryption.seal(str(key), bytes(value)), *rest  # type: ignore[arg-type]

    async def _hash(self, key: str) -> Fields:
        """Empty also if the key has another type: Redis can still be used."""
        (reply,) = await self._call(lambda: self._topology.ask(("HGETALL", key)))
        if isinstance(reply, RedisError) and str(reply).startswith("WRONGTYPE"):
            log.warning("beginning anew: %s in redis is not the hash that it should be", key)
            return {}
        if isinstance(reply, RedisError):
            raise StoreUnavailable(f"redis: {reply}") from reply
        return pairs(reply)

    async def _ping(self) -> None:
        try:
            await self._topology.check()
        except RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    async def _ask(self, command: Command, deadline: float = _DEADLINE) -> Any:
        """The reply to a command. A refusal is a failure of the log. Raises StoreUnavailable."""

        async def ask() -> Any:
            (reply,) = await self._topology.ask(command)
            if isinstance(reply, RedisError):
                raise reply
            return reply

        return await self._call(ask, deadline)

    async def _call(self, operation: Callable[[], Awaitable[Any]], deadline: float = _DEADLINE) -> Any:
        return await self.breaker.call(operation, deadline)


def _event(position: str, fields: Fields) -> Event:
    origin, kind = (fields.get(name, b"").decode(errors="replace") for name in (b"origin", b"kind"))
    number = fields.get(b"number", b"")
    is_number = number.isdigit() and len(number) <= _MAX_DIGITS
    return Event(position, origin, int(number) if is_number else 0, kind, fields.get(b"data", b""))
