"""The second tier: entries in Redis or Valkey, shared by workers and hosts and kept over restarts.

No request waits here longer than one deadline, and only the first one waits so long (see Breaker). Writes are sent in
the background, in order, from a bounded queue. topology.py knows which server has which key.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cache.entries.entry import Entry, decode_entry, encode_entry
from cache.entries.generations import Purge, is_of_tag
from cache.errors import CacheError, CorruptEntry, StoreUnavailable, Undecryptable
from cache.stores.breaker import Breaker
from cache.stores.cluster import Cluster, NodeDown
from cache.stores.encryption import Encryption, NoEncryption
from cache.stores.redis_connections import Command, Connector
from cache.stores.redis_replies import event, info_fields, is_after, pairs, range_items, stream_items
from cache.stores.redis_url import parse_redis_url
from cache.stores.topology import SentinelServers, SingleServer, Topology
from cache.stores.write_queue import Write, WriteQueue

log = logging.getLogger(__name__)

T = TypeVar("T")

_GENERATIONS = "keepgate:generations"  # a hash: scope -> token; beside it a stream, Topology.purges_name
_PURGES_KEPT = 10_000
_PURGE_POLL_MILLISECONDS = 2_000
_BACKGROUND_DEADLINE = 2.0
_BATCH_DELAY = 0.02
# A fetch that takes longer than a deadline would look like an outage: larger answers are kept in memory only.
_MAX_BODY_BYTES = 2**20
_PAUSE_AFTER_FAILURE = 0.1
# More lookups than this at once wait: they would only delay each other.
_CONNECTIONS = 32
_MAX_SECONDS = 100 * 365 * 86_400.0
_LOG_INTERVAL = 10.0
# For how long a deletion is repeated after a failover that has lost it, and not trusted to have reached replicas.
_DELETION_SECONDS = 60.0
_DELETIONS_KEPT = 10_000
_SCAN_COUNT = 1_000
# What Redis says while it cannot take a write that it will take later.
_TRANSIENT = (ReadOnlyError, ClusterDownError, BusyLoadingError, TryAgainError, NodeDown)


def _redis_key(entry_id: str) -> str:
    return f"keepgate:entry:{entry_id}"


class RedisStore:
    """A `Store` in Redis. Make one with `open_redis_store`."""

    def __init__(self, topology: Topology, deadline: float, encryption: Encryption) -> None:
        self._topology = topology
        self._deadline = deadline
        self.encryption = encryption
        self.breaker = Breaker("redis", self._check, (RedisConnectionError, RedisTimeoutError), _BACKGROUND_DEADLINE)
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._pending = WriteQueue()
        self._writing = asyncio.Lock()
        self._deleted: OrderedDict[str, float] = OrderedDict()
        self._refusal_logged = -_LOG_INTERVAL
        self.writes_dropped = 0
        self.corrupt_entries = 0
        self.undecryptable = 0

    def is_pending(self, entry_id: str) -> bool:
        """Whether this process has yet to write the entry, or its removal."""
        return self._pending.get(entry_id) is not None

    async def get(self, entry_id: str) -> Entry | None:
        pending = self._pending.get(entry_id)
        if pending is not None:
            return pending.current()
        name = _redis_key(entry_id)
        command: Command = ("GET", name)
        try:
            if self._was_deleted(entry_id):  # replicas may still have it
                (data,) = await self._call(lambda: self._topology.ask(command))
            else:
                data = await self._call(lambda: self._topology.ask_replica(command))
        except StoreUnavailable:
            if self.breaker.is_open:  # the idle connections may have failed for the same reason
                await self._topology.close()
            raise
        if data is None:
            return None
        if isinstance(data, RedisError):
            raise StoreUnavailable(f"redis: {data}")
        return await self._entry(entry_id, data)

    async def get_many(self, entry_ids: Sequence[str]) -> list[Entry | None]:
        """Entries in the order of their ids, for who inspects them; one that cannot be read is None.

        Raises StoreUnavailable.
        """
        waiting = [self._pending.get(entry_id) for entry_id in entry_ids]
        replies = await self.commands([("GET", _redis_key(entry_id)) for entry_id in entry_ids], _BACKGROUND_DEADLINE)
        found: list[Entry | None] = []
        for entry_id, data, before in zip(entry_ids, replies, waiting, strict=True):
            if isinstance(data, RedisError):
                raise StoreUnavailable(f"redis: {data}")
            pending = self._pending.get(entry_id)
            if pending is None and data is None and not self._was_deleted(entry_id):
                pending = before  # Redis took the write after it had looked for the entry
            if pending is not None:
                found.append(pending.current())
                continue
            entry = None
            with contextlib.suppress(StoreUnavailable):  # it is corrupt
                entry = None if data is None else await self._entry(entry_id, data)
            found.append(entry)
        return found

    async def _entry(self, entry_id: str, data: bytes) -> Entry | None:
        """Raises StoreUnavailable for bytes that are no entry, which are removed; None for those of another key."""
        name = _redis_key(entry_id)
        try:
            entry = decode_entry(await self.encryption.open(name, data))
            if entry.id != entry_id:
                raise CorruptEntry("stored bytes are another entry")
            return entry
        except Undecryptable as error:
            self.undecryptable += 1
            self._log_refusal("an entry in redis counts as a miss: %s", error)
            return None
        except CorruptEntry as error:
            self.corrupt_entries += 1
            log.warning("dropping entry %s from redis: %s", entry_id, error)
            await self.command(("UNLINK", name))
            raise StoreUnavailable(f"redis: {error}") from error

    async def put(self, entry: Entry, keep_for: float) -> None:
        """Queue the write; raises StoreUnavailable when the queue is full of writes that Redis does not take."""
        kept = entry if keep_for > 0 and len(entry.body) <= _MAX_BODY_BYTES else None
        if not self._pending.put(entry.id, kept, keep_for):
            self.writes_dropped += 1
            raise StoreUnavailable("redis: too many writes are waiting")

    async def delete(self, entry_id: str) -> bool:
        """Removes the entry here and, by the stream of purges, from the memory of every worker."""
        was_pending = self._pending.remove(entry_id)
        self.note_deletion(entry_id)

        async def delete() -> bool:
            async with self._writing:  # a concurrent write would restore the entry
                # In this order: a worker that hears of the deletion must not find the entry again. If the second step
                # fails, so does the deletion, and it can be repeated.
                (removed,) = _accepted(await self._topology.ask(("UNLINK", _redis_key(entry_id))))
                _accepted(await self._topology.ask(self._announcement("entry", entry_id, "")))
            return bool(removed)

        return await self._call(delete, _BACKGROUND_DEADLINE) or was_pending

    def note_deletion(self, entry_id: str) -> None:
        """An entry was deleted, here or by another worker: replicas may still have it."""
        self._deleted[entry_id] = time.monotonic()
        self._deleted.move_to_end(entry_id)
        while len(self._deleted) > _DELETIONS_KEPT or not self._was_deleted(next(iter(self._deleted))):
            self._deleted.popitem(last=False)

    def _was_deleted(self, entry_id: str) -> bool:
        """Whether an entry was deleted a short time ago."""
        return bool(self._deleted) and time.monotonic() - self._deleted.get(entry_id, -1e9) < _DELETION_SECONDS

    async def repeat_deletions(self) -> None:
        """Deletes again what was deleted shortly before an outage: a failover may have lost it.

        Raises StoreUnavailable. An answer that was stored since then is deleted as well; it is computed again.
        """
        for entry_id in [entry_id for entry_id in self._deleted if self._was_deleted(entry_id)]:
            if self._pending.get(entry_id) is None:
                await self.command(("UNLINK", _redis_key(entry_id)), _BACKGROUND_DEADLINE)

    def discard_writes(self, is_unwanted: Callable[[Entry], bool]) -> None:
        """Forgets waiting writes of some entries."""
        self._pending.discard(is_unwanted)

    async def purge(self, purge: Purge) -> None:
        """Publishes the purge to all workers. Raises StoreUnavailable."""
        announcement = self._announcement(purge.scope, purge.name, purge.token)
        kept: Command = ("HSET", _GENERATIONS, purge.field, purge.token)
        # A wide purge covers the narrower ones: without their tokens the hash does not grow for ever.
        covered: tuple[Command, ...] = ()
        if purge.scope == "all":
            covered = (("DEL", _GENERATIONS),)
        elif purge.scope == "tags" and (fields := list(filter(is_of_tag, await self.generations()))):
            covered = (("HDEL", _GENERATIONS, *fields),)
        await self._call(lambda: self._topology.transact(*covered, kept, announcement), _BACKGROUND_DEADLINE)

    async def restore_generations(self, tokens: Mapping[str, str]) -> None:
        """Restores the tokens of scopes that Redis has lost; existing ones stay. Raises StoreUnavailable."""
        commands = [("HSETNX", _GENERATIONS, scope, token) for scope, token in tokens.items()]
        await self._call(lambda: self._ask(*commands), _BACKGROUND_DEADLINE)

    async def generations(self) -> dict[str, str]:
        """The token of every scope that was ever purged. Raises StoreUnavailable."""
        tokens = pairs(await self.command(("HGETALL", _GENERATIONS), _BACKGROUND_DEADLINE))
        known: dict[str, str] = {}
        for scope, token in tokens.items():
            with contextlib.suppress(UnicodeDecodeError):  # not written by this version
                known[scope.decode()] = token.decode()
        return known

    async def used_bytes(self) -> int | None:
        """The memory that the servers use, of all masters; None where Redis does not tell. Raises StoreUnavailable."""

        async def ask() -> int | None:
            used = []
            for server in await self._topology.masters():
                (memory,) = await server.ask(("INFO", "memory"))
                used.append(info_fields(memory).get("used_memory", ""))
            return sum(map(int, used)) if all(text.isdecimal() for text in used) else None

        return await self._call(ask, _BACKGROUND_DEADLINE)

    async def warn_of_eviction_policy(self) -> None:
        """Logs a warning where a full Redis would refuse writes; nothing where it cannot be read."""

        async def ask() -> list[dict[str, str]]:
            return [info_fields((await server.ask(("INFO", "memory")))[0]) for server in await self._topology.masters()]

        with contextlib.suppress(StoreUnavailable):
            for fields in await self._call(ask, _BACKGROUND_DEADLINE):
                if fields.get("maxmemory", "0") != "0" and fields.get("maxmemory_policy") == "noeviction":
                    log.warning(
                        "redis has the eviction policy noeviction: when its memory is full, no answer is stored any "
                        "more; volatile-lru or allkeys-lru makes room for new ones"
                    )
                    return

    async def purges_since(self, position: str) -> tuple[str, list[Purge | str]]:
        """Wait for purges after `position`; returns the new position, and purges or ids of deleted entries.

        `position` "" means from now on. A new position before the old one means that the stream has lost events, and
        the purges are to be read from `generations`. Raises StoreUnavailable.
        """
        if not position:
            return await self._newest_position(), []
        stream = self._topology.purges_name
        command: Command = ("XREAD", "COUNT", 500, "BLOCK", _PURGE_POLL_MILLISECONDS, "STREAMS", stream, position)
        (read,) = await self._guarded(
            lambda: self._ask(command), _BACKGROUND_DEADLINE + _PURGE_POLL_MILLISECONDS / 1000
        )
        events: list[Purge | str] = []
        for position_read, fields in stream_items(read):
            position = position_read
            if (found := event(fields)) is not None:
                events.append(found)
        if not read and is_after(position, newest := await self._newest_position()):
            # A failover, or a flush. The tokens of old purges are superseded, but a deletion may be repeated.
            (items,) = await self._call(lambda: self._ask(("XRANGE", stream, "-", "+")), _BACKGROUND_DEADLINE)
            found_events = (event(fields) for _, fields in range_items(items))
            return newest, [deleted for deleted in found_events if isinstance(deleted, str)]
        return position, events

    async def _newest_position(self) -> str:
        command: Command = ("XREVRANGE", self._topology.purges_name, "+", "-", "COUNT", 1)
        newest = range_items(await self.command(command, _BACKGROUND_DEADLINE))
        return newest[0][0] if newest else "0-0"

    async def command(self, command: Command, deadline: float | None = None) -> Any:
        """The reply to a repeatable command, within the deadline of a lookup or another. Raises StoreUnavailable."""
        (reply,) = await self._call(lambda: self._topology.ask(command), deadline)
        if isinstance(reply, RedisError):
            raise StoreUnavailable(f"redis: {reply}")
        return reply

    async def commands(self, commands: Sequence[Command], deadline: float | None = None) -> list[Any]:
        """The replies to repeatable commands that need no common server, sent together.

        A refused one gives a ResponseError. Raises StoreUnavailable.
        """
        return await self._call(lambda: self._topology.ask(*commands), deadline)

    async def patiently(self, ask: Callable[[float], Awaitable[T]], within: float) -> T:
        """What `ask` gives when it has so many seconds, for what a request cannot do without.

        While Redis is away it is waited for, and asked again when it is back. Raises StoreUnavailable.
        """
        loop = asyncio.get_running_loop()
        due = loop.time() + within
        while True:
            try:
                return await ask(max(0.0, due - loop.time()))
            except StoreUnavailable:
                if not self.breaker.is_open:
                    raise
                try:
                    async with asyncio.timeout_at(due):
                        await self.breaker.wait_closed()
                except TimeoutError:
                    pass
                if self.breaker.is_open:
                    raise

    async def scan(self, pattern: str) -> AsyncIterator[list[str]]:
        """The names of all keys that match a pattern, some hundreds at a time. Raises StoreUnavailable."""
        for server in await self._call(self._topology.masters, _BACKGROUND_DEADLINE):
            cursor: str | bytes = "0"
            while True:
                command: Command = ("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                (reply,) = await self._call(lambda command=command: server.ask(command), _BACKGROUND_DEADLINE)  # type: ignore[misc]  # noqa: B023
                if isinstance(reply, RedisError):
                    raise StoreUnavailable(f"redis: {reply}")
                cursor, names = reply
                yield [name.decode(errors="surrogateescape") for name in names]
                if cursor == b"0":
                    break

    async def flush(self) -> None:
        """Write what is pending. Raises StoreUnavailable."""
        while self._pending:
            await self._write_batch()

    async def close_connections(self) -> None:
        await self._topology.close()

    async def write_behind(self) -> None:
        """Move pending writes to Redis; runs for as long as the store is open."""
        while True:
            await self._pending.wait()
            try:
                await self._write_batch()
                # The first write is sent at once; the pause gathers those of a busy gateway into one round trip.
                await asyncio.sleep(_BATCH_DELAY)
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_AFTER_FAILURE)
                await self.breaker.wait_closed()

    async def maintain(self) -> None:
        """Look after the servers; runs for as long as the store is open."""
        await self._topology.maintain()

    async def _write_batch(self) -> None:
        """Raises StoreUnavailable if Redis takes none of the batch now."""

        async def write() -> bool:
            async with self._writing:
                batch = self._pending.batch()
                if not batch:  # written meanwhile
                    return True
                replies = await self._topology.ask(*[await self._write_command(*waiting) for waiting in batch])
                return self._settle(batch, replies) > 0

        if not await self._call(write, _BACKGROUND_DEADLINE):
            raise StoreUnavailable("redis: it takes no writes at present")

    def _settle(self, batch: list[tuple[str, Write]], replies: list[Any]) -> int:
        """Ends the writes of a batch; returns how many of them have ended.

        Out of memory: the write is lost. During a failover it waits, and after some time it is lost as well.
        """
        refusals: list[RedisError] = []
        ended = len(batch)
        for (entry_id, write), reply in zip(batch, replies, strict=True):
            if isinstance(reply, _TRANSIENT) and self._pending.retry(entry_id, write):
                ended -= 1
                continue
            if isinstance(reply, RedisError):
                refusals.append(reply)
            self._pending.done(entry_id, write)
        if refusals:
            self.writes_dropped += len(refusals)
            self._log_refusal("redis refused %d of %d writes: %s", len(refusals), len(batch), refusals[0])
        return ended

    async def _write_command(self, entry_id: str, write: Write) -> Command:
        name = _redis_key(entry_id)
        remaining = min(write.expires - time.monotonic(), _MAX_SECONDS)
        if write.entry is None or remaining < 0.001:
            return "UNLINK", name
        return "SET", name, await self.encryption.seal(name, encode_entry(write.entry)), "PX", round(remaining * 1000)

    def _log_refusal(self, message: str, *arguments: Any) -> None:
        """Logs a warning, unless one of these was logged shortly before."""
        now = time.monotonic()
        if now - self._refusal_logged >= _LOG_INTERVAL:
            self._refusal_logged = now
            log.warning(message, *arguments)

    def _announcement(self, scope: str, name: str, token: str) -> Command:
        fields = ("scope", scope, "name", name, "token", token)
        return "XADD", self._topology.purges_name, "MAXLEN", "~", _PURGES_KEPT, "*", *fields

    async def _ask(self, *commands: Command) -> list[Any]:
        """Raises RedisError if one of them is refused."""
        return _accepted(await self._topology.ask(*commands))

    async def _check(self) -> None:
        try:
            await self._topology.check()
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


def _accepted(replies: list[Any]) -> list[Any]:
    """The replies, none of which is a refusal. Raises RedisError."""
    for reply in replies:
        if isinstance(reply, RedisError):
            raise reply
    return replies


def _topology_of(url: str) -> Topology:
    """Raises ValueError for a URL that is none."""
    parsed = parse_redis_url(url)
    connector = Connector(parsed.server)
    match parsed.kind:
        case "single":
            return SingleServer(connector)
        case "sentinel":
            return SentinelServers(parsed, connector)
        case "cluster":
            return Cluster(parsed, connector)


@asynccontextmanager
async def open_topology(url: str) -> AsyncIterator[Topology]:
    """The servers of a Redis, without a store: nothing is asked of them yet. Raises ValueError for no such URL."""
    topology = _topology_of(url)
    maintaining = asyncio.create_task(topology.maintain())
    maintaining.add_done_callback(_report_end)
    try:
        yield topology
    finally:
        maintaining.cancel()
        await asyncio.wait([maintaining])
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(_BACKGROUND_DEADLINE):
                await topology.close()


@asynccontextmanager
async def open_redis_store(
    url: str, deadline: float, encryption: Encryption | None = None
) -> AsyncIterator[RedisStore]:
    """A store over the Redis at `url` (see redis_url.py), each request-path call within `deadline` s.

    An unreachable Redis is no error: the store raises StoreUnavailable until it is up. A refused password is one:
    raises StoreUnavailable at once, and ValueError for a URL that is none.
    """
    store = RedisStore(_topology_of(url), deadline, encryption or NoEncryption())
    try:
        await _check_credentials(store)
        works = (store.breaker.watch(), store.write_behind(), store.maintain())
        # Not a TaskGroup: that would wrap what the caller raises, and cancel the caller for a fault of the cache.
        background = [asyncio.create_task(work) for work in works]
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


async def _check_credentials(store: RedisStore) -> None:
    """Raises StoreUnavailable for refused credentials; any other failure trips the breaker."""
    try:
        async with asyncio.timeout(_BACKGROUND_DEADLINE):
            await store._topology.check()
    except (RedisError, OSError, TimeoutError, CacheError) as error:
        # A connection reports a refused handshake as lost, with the reason as its cause.
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, AuthenticationError):
            reason = reason.__cause__
        if reason is not None:
            raise StoreUnavailable(f"redis refuses the credentials of its URL: {reason}") from error
        store.breaker.trip(error)
    else:
        await store.warn_of_eviction_policy()


def _report_end(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("the background work of the redis tier ended", exc_info=error)
