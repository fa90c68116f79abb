"""Records in Redis, and a stream of changes, by which all processes share what they learn at once.

keepgate:semantic:record:<entry>   a record and its vector, until the answer expires
keepgate:semantic:records          sorted set of all entries, by the time at which they expire
keepgate:semantic:log              stream: put, remove, wrong and label, in the order in which all see them
keepgate:semantic:policy:<name>    a policy's state, and its position in the stream
"""

import asyncio
import itertools
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Literal

import msgspec
from redis.exceptions import RedisError

from cache.errors import CorruptEntry, StoreUnavailable, Undecryptable
from cache.semantic.embedding.encoder import Vector
from cache.semantic.service.records import Record, decode_record, encode_record
from cache.stores.breaker import Breaker
from cache.stores.encryption import Encryption
from cache.stores.redis_connections import Command
from cache.stores.redis_replies import Fields, range_items, stream_items
from cache.stores.topology import Topology

log = logging.getLogger(__name__)

_RECORD = "keepgate:semantic:record:"
_RECORDS = "keepgate:semantic:records"
_LOG = "keepgate:semantic:log"
_POLICY = "keepgate:semantic:policy:"
_EVENTS_KEPT = 100_000
_EVENTS_AT_ONCE = 16  # while lookups wait: a label takes some fifty microseconds, and a record as long
_RECORDS_AT_ONCE = 256
_POLL_SECONDS = 2.0
_DEADLINE = 5.0
_MAX_WAITING = 20_000
_WRITES_PER_BATCH = 128
_PAUSE = 0.5
_POSITION = re.compile(rb"[0-9]{1,18}-[0-9]{1,18}")

Kind = Literal["put", "remove", "wrong", "label"]


def _nothing() -> None: ...


class Event(msgspec.Struct, frozen=True, array_like=True):
    """What the process `origin` did: to an entry, or it has learned a label.

    `number` counts the events of its origin, so that one written twice, since the first reply was lost, is known.
    """

    origin: str
    number: int
    kind: Kind
    entry: str = ""
    label: bytes = b""


class RecordLog:
    """This process's access to the shared records. No request waits for it.

    Args:
        encoder: the fingerprint of the embedding model, whose vectors have `dimensions`.
    """

    def __init__(self, topology: Topology, encoder: str, dimensions: int, encryption: Encryption) -> None:
        self.origin = secrets.token_hex(8)
        self.breaker = Breaker("redis (semantic)", topology.check, (RedisError,), _DEADLINE)
        self.dropped = 0
        """Writes that Redis did not take."""
        self.corrupt = 0
        self._topology = topology
        self._encoder = encoder
        self._dimensions = dimensions
        self._encryption = encryption
        # Commands, each with what to do if Redis refuses it.
        self._waiting: deque[tuple[Command, Callable[[], None]]] = deque()
        self._has_waiting = asyncio.Event()
        self._number = 0

    def save(self, record: Record, vector: Vector, *, replaces: bool = False, announced: bool = True) -> None:
        """Stores a record until it expires. One that `replaces` another is not stored if that was removed meanwhile."""
        remaining = round((record.expires - time.time()) * 1000)
        if remaining <= 0:
            return
        condition = ("XX",) if replaces else ()
        stored = encode_record(record, vector, self._encoder)
        self._write("SET", _RECORD + record.entry, stored, "PX", remaining, *condition)
        if not replaces:
            self._write("ZADD", _RECORDS, record.expires, record.entry)
        if announced:
            self.announce("put", record.entry)

    def remove(self, entries: Sequence[str], announced: bool) -> None:
        for entry in entries:
            self._write("UNLINK", _RECORD + entry)
            if announced:
                self.announce("remove", entry)
        self._write("ZREM", _RECORDS, *entries)

    def announce(self, kind: Kind, entry: str = "", label: bytes = b"", lost: Callable[[], None] = _nothing) -> None:
        """Tells all processes, this one included, of an event: all see events in one order.

        "wrong" says that an answer was wrong that was served from the entry. `lost` is called if Redis refuses it.
        """
        self._number += 1
        event = msgspec.msgpack.encode(Event(self.origin, self._number, kind, entry, label))
        self._write("XADD", _LOG, "MAXLEN", "~", _EVENTS_KEPT, "*", "event", event, lost=lost)

    async def make_room(self, policy: str) -> None:
        """Removes values of a wrong type at the keys of this process. Raises StoreUnavailable."""
        for key, kind in ((_RECORDS, b"zset"), (_LOG, b"stream"), (_POLICY + policy, b"hash")):
            found = await self._ask("TYPE", key)
            if found not in (kind, b"none"):
                log.warning("removing %s from redis: it is a %s and should be a %s", key, found.decode(), kind.decode())
                await self._ask("UNLINK", key)

    async def load(self) -> AsyncIterator[list[tuple[Record, Vector | None]]]:
        """All records, some hundreds at a time; without a vector if it is of another model."""
        cursor = None
        while cursor != b"0":
            cursor, found = await self._ask("ZSCAN", _RECORDS, cursor or b"0", "COUNT", _RECORDS_AT_ONCE)
            yield await self.records([entry.decode(errors="replace") for entry in found[::2]])

    async def records(self, entries: Sequence[str]) -> list[tuple[Record, Vector | None]]:
        """Those of these records that exist and are valid. Raises StoreUnavailable."""
        stored = await self._replies(*(("GET", _RECORD + entry) for entry in entries))
        valid: list[tuple[Record, Vector | None]] = []
        for entry, data in zip(entries, stored, strict=True):
            try:
                if isinstance(data, bytes):
                    opened = await self._encryption.open(_RECORD + entry, data)
                    valid.append(decode_record(opened, entry, self._encoder, self._dimensions))
            except (CorruptEntry, Undecryptable) as error:
                self.corrupt += 1
                log.warning("ignoring the record of %s in redis: %s", entry, error)
        return valid

    async def newest(self) -> str:
        """The position of the newest event. Raises StoreUnavailable."""
        newest = range_items(await self._ask("XREVRANGE", _LOG, "+", "-", "COUNT", 1))
        return newest[0][0] if newest else "0-0"

    async def since(self, position: str) -> list[tuple[str, Event | None]]:
        """Wait for events after a position, for two seconds at most. Raises StoreUnavailable.

        Each with its own position; None for one that this version does not know.
        """
        poll = ("BLOCK", round(1000 * _POLL_SECONDS), "STREAMS", _LOG, position)
        read = await self._ask("XREAD", "COUNT", _EVENTS_AT_ONCE, *poll, deadline=_DEADLINE + _POLL_SECONDS)
        return [(place, _event(fields)) for place, fields in stream_items(read)]

    async def learned(self, name: str) -> tuple[str, bytes] | None:
        """A policy's state, and the position up to which it has seen the stream. Raises StoreUnavailable."""
        position, state = await self._ask("HMGET", _POLICY + name, "position", "state")
        return (position.decode(), state) if state and _POSITION.fullmatch(position or b"") else None

    async def keep_learned(self, name: str, position: str, state: bytes) -> None:
        """Stores a policy's state. An older one in its place costs only some events more to read."""
        await self._ask("HSET", _POLICY + name, "position", position, "state", state)

    async def sweep(self) -> None:
        """Removes the ids of expired entries. Raises StoreUnavailable."""
        await self._ask("ZREMRANGEBYSCORE", _RECORDS, "-inf", time.time())

    async def write(self) -> None:
        """Write what is waiting, in order; runs for as long as the log is used."""
        while True:
            await self._has_waiting.wait()
            try:
                await self.flush()
            except StoreUnavailable:
                await self.wait_available()

    async def wait_available(self) -> None:
        """After a failure: some time at least, so that nobody asks in vain without a pause."""
        await asyncio.sleep(_PAUSE)
        await self.breaker.wait_closed()

    async def flush(self) -> None:
        """Write everything now. Raises StoreUnavailable."""
        while self._waiting:
            batch = list(itertools.islice(self._waiting, _WRITES_PER_BATCH))
            refused: list[tuple[Callable[[], None], RedisError]] = []
            for are_events in (False, True):  # the events last: another server may have what they are about
                writes = [(command, lost) for command, lost in batch if (command[0] == "XADD") == are_events]
                replies = await self._replies(*[await self._sealed(command) for command, _ in writes])
                found = zip(writes, replies, strict=True)
                refused += [(lost, reply) for (_, lost), reply in found if isinstance(reply, RedisError)]
            for _ in batch:
                self._waiting.popleft()
            for lost, _ in refused:
                self.dropped += 1
                lost()
            if refused:
                log.warning("redis refused %d of %d writes: %s", len(refused), len(batch), refused[0][1])
        self._has_waiting.clear()

    def _write(self, *command: str | bytes | int | float, lost: Callable[[], None] = _nothing) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            self.dropped += 1
            lost()
            return
        self._waiting.append((command, lost))
        self._has_waiting.set()

    async def _sealed(self, command: Command) -> Command:
        if command[0] != "SET":
            return command
        _, key, value, *rest = command
        return "SET", key, await self._encryption.seal(str(key), bytes(value)), *rest  # type: ignore[arg-type]

    async def _ask(self, *command: str | bytes | int | float, deadline: float = _DEADLINE) -> Any:
        """The reply to one command. Raises StoreUnavailable, also if Redis refuses it."""
        (reply,) = await self._replies(command, deadline=deadline)
        if isinstance(reply, RedisError):
            self.breaker.trip(reply)
            raise StoreUnavailable(f"redis: {reply}") from reply
        return reply

    async def _replies(self, *commands: Command, deadline: float = _DEADLINE) -> list[Any]:
        """The replies to commands, refusals among them. Raises StoreUnavailable."""
        if not commands:
            return []
        return await self.breaker.call(lambda: self._topology.ask(*commands), deadline)


def _event(fields: Fields) -> Event | None:
    try:
        return msgspec.msgpack.decode(fields.get(b"event", b""), type=Event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
