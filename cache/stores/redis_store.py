"""The second tier: entries in Redis or Valkey, shared by workers and hosts and kept over restarts.

No request waits here longer than one deadline, and only the first one waits so long (see Breaker). Writes are sent in
the background, in order, from a bounded queue.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar, cast, get_args

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cache.entries.entry import Entry, decode_entry, encode_entry
from cache.entries.generations import Purge, Scope
from cache.errors import CorruptEntry, StoreUnavailable
from cache.stores.breaker import Breaker
from cache.stores.redis_connections import Command, RedisConnections

log = logging.getLogger(__name__)

T = TypeVar("T")

_PURGES = "keepgate:purges"  # a stream: a worker resumes where it stopped
_GENERATIONS = "keepgate:generations"  # a hash: scope -> token
_PURGES_KEPT = 10_000
_PURGE_POLL_MILLISECONDS = 2_000
_BACKGROUND_DEADLINE = 2.0
_PENDING_BYTES = 64 * 2**20
_WRITE_OVERHEAD_BYTES = 1500
_BATCH_DELAY = 0.02
_WRITES_PER_BATCH = 64
_BYTES_PER_BATCH = 8 * 2**20
# A fetch that takes longer than a deadline would look like an outage: larger answers are kept in memory only.
_MAX_BODY_BYTES = 2**20
_PAUSE_AFTER_FAILURE = 0.1
# More lookups than this at once wait: they would only delay each other.
_CONNECTIONS = 32
# For the probe and the reader of purges, which must not wait for lookups.
_OWN_CONNECTIONS = 4
_MAX_SECONDS = 100 * 365 * 86_400.0


def _redis_key(entry_id: str) -> str:
    return f"keepgate:entry:{entry_id}"


class _Write(NamedTuple):
    """A pending write: an entry until `expires` (monotonic seconds), or None for its removal."""

    entry: Entry | None
    expires: float
    size: int

    def current(self) -> Entry | None:
        return self.entry if self.expires > time.monotonic() else None


class RedisStore:
    """A `Store` in Redis. Make one with `open_redis_store`."""

    def __init__(self, client: "redis.asyncio.Redis", deadline: float) -> None:
        self._client = client
        self._connections = RedisConnections(client.connection_pool)
        self._deadline = deadline
        self.breaker = Breaker("redis", self._ping, (RedisConnectionError, RedisTimeoutError), _BACKGROUND_DEADLINE)
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._pending: OrderedDict[str, _Write] = OrderedDict()
        self._pending_bytes = 0
        self._has_pending = asyncio.Event()
        self._writing = asyncio.Lock()
        self.writes_dropped = 0
        self.corrupt_entries = 0

    async def get(self, entry_id: str) -> Entry | None:
        pending = self._pending.get(entry_id)
        if pending is not None:
            return pending.current()
        try:
            (data,) = await self._call(lambda: self._connections.ask(("GET", _redis_key(entry_id))))
        except StoreUnavailable:
            if self.breaker.is_open:  # the idle connections may have failed for the same reason
                await self._connections.close()
            raise
        if data is None:
            return None
        if isinstance(data, RedisError):
            raise StoreUnavailable(f"redis: {data}")
        try:
            entry = decode_entry(data)
            if entry.id != entry_id:
                raise CorruptEntry("stored bytes are another entry")
            return entry
        except CorruptEntry as error:
            self.corrupt_entries += 1
            log.warning("dropping entry %s from redis: %s", entry_id, error)
            await self._call(lambda: self._client.unlink(_redis_key(entry_id)))
            raise StoreUnavailable(f"redis: {error}") from error

    async def put(self, entry: Entry, keep_for: float) -> None:
        """Queue the write; raises StoreUnavailable when the queue is full of writes that Redis does not take."""
        self._forget_pending(entry.id)
        kept = entry if keep_for > 0 and len(entry.body) <= _MAX_BODY_BYTES else None
        size = _WRITE_OVERHEAD_BYTES + (len(entry.body) if kept else 0)
        if self._pending_bytes + size > _PENDING_BYTES:
            self.writes_dropped += 1
            raise StoreUnavailable("redis: too many writes are waiting")
        self._pending[entry.id] = _Write(kept, time.monotonic() + keep_for, size)
        self._pending_bytes += size
        self._has_pending.set()

    async def delete(self, entry_id: str) -> bool:
        """Removes the entry here and, by the stream of purges, from the memory of every worker."""
        was_pending = self._forget_pending(entry_id)

        async def delete() -> bool:
            async with self._writing:  # a concurrent write would restore the entry
                pipeline = self._client.pipeline(transaction=True)
                pipeline.unlink(_redis_key(entry_id))
                self._announce(pipeline, "entry", entry_id, "")
                removed, _ = await pipeline.execute()
            return bool(removed)

        return await self._call(delete, _BACKGROUND_DEADLINE) or was_pending

    async def purge(self, purge: Purge) -> None:
        """Publishes the purge to all workers. Raises StoreUnavailable."""

        async def publish() -> None:
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hset(_GENERATIONS, purge.field, purge.token)
            self._announce(pipeline, purge.scope, purge.name, purge.token)
            await pipeline.execute()

        await self._call(publish, _BACKGROUND_DEADLINE)

    async def restore_generations(self, tokens: Mapping[str, str]) -> None:
        """Restores the tokens of scopes that Redis has lost; existing ones stay. Raises StoreUnavailable."""

        async def restore() -> None:
            pipeline = self._client.pipeline(transaction=False)
            for scope, token in tokens.items():
                pipeline.hsetnx(_GENERATIONS, scope, token)
            await pipeline.execute()

        await self._call(restore, _BACKGROUND_DEADLINE)

    async def generations(self) -> dict[str, str]:
        """The token of every scope that was ever purged. Raises StoreUnavailable."""
        tokens = await self._call(lambda: self._client.hgetall(_GENERATIONS), _BACKGROUND_DEADLINE)
        known: dict[str, str] = {}
        for scope, token in tokens.items():
            with contextlib.suppress(UnicodeDecodeError):  # not written by this version
                known[_text(scope)] = _text(token)
        return known

    async def usage(self) -> tuple[int, int]:
        """(keys in the database, bytes the server uses). Raises StoreUnavailable."""

        async def ask() -> tuple[int, int]:
            keys = await self._client.dbsize()
            info = await self._client.info("memory")
            return keys, info["used_memory"]

        return await self._call(ask, _BACKGROUND_DEADLINE)

    async def purges_since(self, position: str) -> tuple[str, list[Purge | str]]:
        """Wait for purges after `position`; returns the new position, and purges or ids of deleted entries.

        `position` "" means from now on. Raises StoreUnavailable.
        """
        if not position:
            newest = await self._call(lambda: self._client.xrevrange(_PURGES, count=1), _BACKGROUND_DEADLINE)
            return (_text(newest[0][0]) if newest else "0-0"), []
        read = await self._guarded(
            lambda: self._client.xread({_PURGES: position}, count=500, block=_PURGE_POLL_MILLISECONDS),
            _BACKGROUND_DEADLINE + _PURGE_POLL_MILLISECONDS / 1000,
        )
        events: list[Purge | str] = []
        for position_read, fields in _stream_items(read):
            position = _text(position_read)
            if (event := _event(fields)) is not None:
                events.append(event)
        return position, events

    async def command(self, command: Command, deadline: float | None = None) -> Any:
        """The reply to a repeatable command, within the deadline of a lookup or another. Raises StoreUnavailable."""
        (reply,) = await self._call(lambda: self._connections.ask(command), deadline)
        if isinstance(reply, RedisError):
            raise StoreUnavailable(f"redis: {reply}")
        return reply

    async def flush(self) -> None:
        """Write what is pending. Raises StoreUnavailable."""
        while self._pending:
            await self._write_batch()

    async def close_connections(self) -> None:
        await self._connections.close()
        await self._client.aclose()

    async def write_behind(self) -> None:
        """Move pending writes to Redis; runs for as long as the store is open."""
        while True:
            await self._has_pending.wait()
            try:
                await self._write_batch()
                # The first write is sent at once; the pause gathers those of a busy gateway into one round trip.
                await asyncio.sleep(_BATCH_DELAY)
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)
                await self.breaker.wait_closed()

    async def _write_batch(self) -> None:
        async def write() -> None:
            async with self._writing:
                batch = self._next_batch()
                replies = await self._connections.ask(*(_command(entry_id, pending) for entry_id, pending in batch))
                # Out of memory or read only: these writes are lost, the others stay in the queue.
                refusals = [reply for reply in replies if isinstance(reply, RedisError)]
                if refusals:
                    self.writes_dropped += len(refusals)
                    log.warning("redis refused %d of %d writes: %s", len(refusals), len(batch), refusals[0])
                for entry_id, pending in batch:
                    if self._pending.get(entry_id) is pending:
                        self._forget_pending(entry_id)

        await self._call(write, _BACKGROUND_DEADLINE)

    def _next_batch(self) -> list[tuple[str, _Write]]:
        """The oldest pending writes, at least one of them and no more than a slow link sends in time."""
        batch: list[tuple[str, _Write]] = []
        size = 0
        for entry_id, pending in self._pending.items():
            size += pending.size
            if batch and (size > _BYTES_PER_BATCH or len(batch) == _WRITES_PER_BATCH):
                break
            batch.append((entry_id, pending))
        return batch

    def _forget_pending(self, entry_id: str) -> bool:
        pending = self._pending.pop(entry_id, None)
        if pending is None:
            return False
        self._pending_bytes -= pending.size
        if not self._pending:
            self._has_pending.clear()
        return pending.current() is not None

    def _announce(self, pipeline: Any, scope: str, name: str, token: str) -> None:
        event = {"scope": scope, "name": name, "token": token}
        pipeline.xadd(_PURGES, event, maxlen=_PURGES_KEPT, approximate=True)

    async def _ping(self) -> None:
        try:
            await self._client.ping()
        except RedisError as error:
            raise StoreUnavailable(f"redis: {error}") from error

    async def _call(self, operation: Callable[[], Awaitable[T]], deadline: float | None = None) -> T:
        if deadline is None:
            deadline = self._deadline
        if self._slots.locked():
            await self._wait_for_slot(deadline)
        else:
            await self._slots.acquire()  # at once
        try:
            return await self._guarded(operation, deadline)
        finally:
            self._slots.release()

    async def _wait_for_slot(self, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline):
                await self._slots.acquire()
        except TimeoutError as error:  # too many requests of this process, not a failure of Redis
            raise StoreUnavailable("redis: every connection is busy") from error

    async def _guarded(self, operation: Callable[[], Awaitable[T]], deadline: float) -> T:
        try:
            return await self.breaker.call(operation, deadline)
        except RedisError as error:  # Redis answered with an error: the breaker stays closed
            raise StoreUnavailable(f"redis: {error}") from error


def _command(entry_id: str, write: _Write) -> Command:
    remaining = min(write.expires - time.monotonic(), _MAX_SECONDS)
    if write.entry is None or remaining < 0.001:
        return "UNLINK", _redis_key(entry_id)
    return "SET", _redis_key(entry_id), encode_entry(write.entry), "PX", round(remaining * 1000)


def _text(reply: Any) -> str:
    """redis-py types every reply as text or bytes; this client gets bytes."""
    return cast(bytes, reply).decode()


def _event(fields: dict[bytes, bytes]) -> Purge | str | None:
    """A purge, or the id of a deleted entry; None if this version does not know it."""
    try:
        scope, name, token = (_text(fields[field]) for field in (b"scope", b"name", b"token"))
    except (KeyError, UnicodeDecodeError):
        return None
    if scope == "entry":
        return name
    return Purge(cast(Scope, scope), name, token) if scope in get_args(Scope) else None


def _stream_items(read: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """XREAD's reply is a list of pairs in RESP2 and a map in RESP3."""
    if not read:
        return []
    replies = read.values() if isinstance(read, dict) else (items for _, items in read)
    return [pair for items in replies for pair in (items[0] if items and isinstance(items[0], list) else items)]


@asynccontextmanager
async def open_redis_store(url: str, deadline: float) -> AsyncIterator[RedisStore]:
    """A store over the Redis at `url` (redis://, rediss://, unix://), each request-path call within `deadline` s.

    An unreachable Redis is no error: the store raises StoreUnavailable until it is up. A refused password is one:
    raises StoreUnavailable at once.
    """
    client = redis.asyncio.from_url(
        url,
        socket_connect_timeout=_BACKGROUND_DEADLINE,
        # With a timeout of its own the client uses asyncio.wait_for, which in Python 3.11 can swallow a cancellation:
        # deadlines would pass unnoticed and tasks would never end. Every call has a deadline here.
        socket_timeout=None,
        # Once more on a new connection: a closed one does not mean that the server is down.
        retry=Retry(NoBackoff(), 1),
        # Sending the client library's name means reading its metadata for every new connection, which blocks the event
        # loop for longer than some deadlines; and RESP2 needs no HELLO before a lookup.
        driver_info=None,
        protocol=2,
        max_connections=_CONNECTIONS + _OWN_CONNECTIONS,
    )
    store = RedisStore(client, deadline)
    try:
        await _check_credentials(client, store)
        # Not a TaskGroup: that would wrap what the caller raises, and cancel the caller for a fault of the cache.
        background = [asyncio.create_task(work) for work in (store.breaker.watch(), store.write_behind())]
        for task in background:
            task.add_done_callback(_report_end)
        try:
            yield store
        finally:
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            if store.breaker.is_open:  # it may be available again since the last probe
                await store.breaker.try_again()
            try:
                await store.flush()
            except StoreUnavailable as error:
                log.warning("answers of the last moments were not written to redis: %s", error)
    finally:
        try:
            async with asyncio.timeout(_BACKGROUND_DEADLINE):
                await store.close_connections()
        except (RedisError, TimeoutError, OSError) as error:
            log.warning("a connection to redis did not end in time: %s", error)


async def _check_credentials(client: "redis.asyncio.Redis", store: RedisStore) -> None:
    """Raises StoreUnavailable for refused credentials; any other failure trips the breaker."""
    try:
        async with asyncio.timeout(_BACKGROUND_DEADLINE):
            await client.ping()
    except (RedisError, OSError, TimeoutError) as error:
        # The client reports a refused handshake as a lost connection, with the reason as its cause.
        if isinstance(error.__cause__, AuthenticationError) or isinstance(error, AuthenticationError):
            raise StoreUnavailable(f"redis refuses the credentials of its URL: {error}") from error
        store.breaker.trip(error)


def _report_end(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the background work of the redis tier ended", exc_info=error)
