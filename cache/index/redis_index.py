"""The index in Redis, beside the entries: sorted sets of ids.

`keepgate:index:model:<model>` and `:namespace:<namespace>` have the time of each answer as its score,
`:like:<namespace>` the question before the id, and `:hits` how often it was served. The sets `:models` and
`:namespaces` name them. Members are written a second later than entries and stay when an entry expires, is evicted or
purged, until somebody comes upon them: who reads a page, or the sweep, which one process at a time does.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cache.entries.entry import Entry
from cache.entries.generations import Purge
from cache.entries.key import namespace_of
from cache.errors import StoreUnavailable
from cache.index.entry_index import EntryFilter, InvalidCursor, Page
from cache.index.fingerprint import decode_fingerprint
from cache.stores.redis_connections import Command
from cache.stores.redis_store import RedisStore

log = logging.getLogger(__name__)

_PREFIX = "keepgate:index:"
_MODELS, _NAMESPACES, _HITS, _SWEEPER = (_PREFIX + name for name in ("models", "namespaces", "hits", "sweeper"))
_DEADLINE = 2.0
_FLUSH_SECONDS = 1.0
# Counts of hits are written less often: an entry that is served often is one command.
_FLUSHES_PER_HITS = 5
_MAX_WAITING = 20_000
_MEMBERS_PER_COMMAND = 500
_MAX_HITS = 100_000
_NAMESPACES_ASKED = 250
_SWEPT_AT_ONCE = 500
_SWEEP_SECONDS = 1.0
_ROUND_SECONDS = 30.0
_SWEEPER_SECONDS = 10
_ENTRY = "keepgate:entry:"
_SEMANTIC = "keepgate:semantic:records"  # see cache/semantic/service/record_log.py


class _Stored(NamedTuple):
    model: str
    created: float
    asked: bytes


class RedisIndex:
    """An `EntryIndex`. The caller runs `write_behind` and `sweep_forever`."""

    def __init__(self, redis: RedisStore) -> None:
        self._redis = redis
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._hits: dict[str, int] = {}
        self._me = secrets.token_hex(8)
        self._flushing = asyncio.Lock()

    def stored(self, entry: Entry) -> None:
        self._stored[entry.id] = _Stored(entry.model, entry.created, entry.asked)
        if len(self._stored) > _MAX_WAITING:
            self._stored.popitem(last=False)

    def hit(self, entry_id: str) -> None:
        hits = self._hits
        if (count := hits.get(entry_id)) is not None:
            hits[entry_id] = count + 1
        elif len(hits) < _MAX_WAITING:
            hits[entry_id] = 1

    async def write_behind(self) -> None:
        """Write each second what was stored, and each five seconds what was served; runs as long as it is used."""
        for turn in range(1, 2**62):
            await asyncio.sleep(_FLUSH_SECONDS)
            with contextlib.suppress(StoreUnavailable):  # it waits
                await self._flush(with_hits=turn % _FLUSHES_PER_HITS == 0)

    async def flush(self) -> None:
        await self._flush(with_hits=True)

    async def _flush(self, *, with_hits: bool) -> None:
        async with self._flushing:
            if self._stored:
                stored, self._stored = self._stored, OrderedDict()
                try:
                    await self._run(_additions(stored))
                except StoreUnavailable:
                    self._stored = OrderedDict([*stored.items(), *self._stored.items()][-_MAX_WAITING:])
                    raise
            if with_hits and self._hits:
                hits, self._hits = self._hits, {}
                try:
                    for batch in _batches(list(hits.items())):
                        await self._run([("ZINCRBY", _HITS, count, entry_id) for entry_id, count in batch])
                        for entry_id, _ in batch:
                            del hits[entry_id]
                finally:  # what was not written waits
                    for entry_id, count in hits.items():
                        self._hits[entry_id] = self._hits.get(entry_id, 0) + count

    async def page(self, wanted: EntryFilter, cursor: str | None, limit: int) -> Page:
        if wanted.by_hits:
            return await self._hottest(wanted, cursor, limit)
        if wanted.namespace:
            names = [_of_namespace(wanted.namespace)]
        elif wanted.model:
            names = [_of_model(wanted.model)]
        else:
            names = [_of_model(model) for model in await self._members(_MODELS)]
        return await self._newest(names, wanted, cursor, limit)

    async def _newest(self, names: Sequence[str], wanted: EntryFilter, cursor: str | None, limit: int) -> Page:
        highest, last_id = _read_cursor(cursor) if cursor is not None else (wanted.until, "")
        extra = 1
        while True:
            bounds = (_score(highest), _score(wanted.since), "WITHSCORES", "LIMIT", 0, limit + extra)
            replies = await self._run([("ZREVRANGEBYSCORE", name, *bounds) for name in names])
            found = sorted((pair for reply in replies for pair in _scored(reply)), reverse=True)
            rest = [pair for pair in found if not last_id or pair < (highest, last_id)]
            # Only the last one of this page may be as old as a whole further page.
            if len(rest) > limit or all(len(_scored(reply)) < limit + extra for reply in replies):
                break
            extra *= 4
        page = rest[:limit]
        more = f"{page[-1][0]!r} {page[-1][1]}" if len(rest) > limit else None
        return Page([entry_id for _, entry_id in page], more)

    async def _hottest(self, wanted: EntryFilter, cursor: str | None, limit: int) -> Page:
        """By rank: ids that have gone up or down between two pages may be there twice, or not at all."""
        try:
            start = 0 if cursor is None else int(cursor)
        except ValueError as error:
            raise InvalidCursor(cursor) from error
        (reply,) = await self._run([("ZREVRANGE", _HITS, start, start + limit - 1, "WITHSCORES")])
        scored = _scored(reply)
        enough = [entry_id for hits, entry_id in scored if hits >= wanted.min_hits]
        ids = [each for each in enough if wanted.namespace in ("", namespace_of(each))]
        return Page(ids, str(start + limit) if len(enough) == limit else None)

    async def asked_like(self, namespace: str, question: bytes, limit: int) -> Sequence[str]:
        start = question.hex() + "."
        command: Command = (
            "ZRANGEBYLEX",
            _like(namespace),
            f"[{start}",
            f"({question.hex()}/",  # the sign after a dot
            "LIMIT",
            0,
            limit,
        )
        (reply,) = await self._run([command])
        return [namespace + "." + member.decode().removeprefix(start) for member in reply]

    async def elsewhere(self, entry_id: str, limit: int) -> Sequence[str]:
        namespace, _, request = entry_id.partition(".")
        (reply,) = await self._run([("SRANDMEMBER", _NAMESPACES, _NAMESPACES_ASKED)])
        others = [each for each in (member.decode() for member in reply) if each != namespace]
        exist = await self._run([("EXISTS", f"{_ENTRY}{other}.{request}") for other in others])
        return [other for other, exists in zip(others, exist, strict=True) if exists][:limit]

    async def hits(self, ids: Sequence[str]) -> Sequence[int]:
        replies = await self._run([("ZSCORE", _HITS, entry_id) for entry_id in ids])
        return [int(float(reply or 0)) for reply in replies]

    async def in_semantic(self, ids: Sequence[str]) -> Sequence[bool]:
        replies = await self._run([("ZSCORE", _SEMANTIC, entry_id) for entry_id in ids])
        return [reply is not None for reply in replies]

    async def counts(self) -> Mapping[str, int]:
        models = await self._members(_MODELS)
        replies = await self._run([("ZCARD", _of_model(model)) for model in models])
        return {model: count for model, count in zip(models, replies, strict=True) if count}

    async def ages(self, bounds: Sequence[float], now: float) -> Sequence[int]:
        models = await self._members(_MODELS)
        edges = [math.inf, *(now - bound for bound in bounds), -math.inf]
        ranges = [
            (_score(older), "+inf" if newer == math.inf else f"({newer!r}")
            for newer, older in itertools.pairwise(edges)
        ]
        replies = await self._run([("ZCOUNT", _of_model(model), *each) for each in ranges for model in models])
        size = len(models)
        return [sum(replies[start * size : (start + 1) * size]) for start in range(len(ranges))]

    async def sizes(self, sample: int) -> Sequence[int]:
        counts = await self.counts()
        total = sum(counts.values())
        if not total:
            return []
        shares = {model: max(1, round(sample * count / total)) for model, count in counts.items()}
        replies = await self._run([("ZRANDMEMBER", _of_model(model), share) for model, share in shares.items()])
        names = [_ENTRY + entry_id.decode() for reply in replies for entry_id in reply]
        lengths = await self._run([("STRLEN", name) for name in names[: 2 * sample]])
        return [length for length in lengths if length]

    async def forget(self, ids: Sequence[str]) -> None:
        if not ids:
            return
        for entry_id in ids:
            self._stored.pop(entry_id, None)
            self._hits.pop(entry_id, None)
        models = await self._members(_MODELS)
        by_namespace: dict[str, list[str]] = {}
        for entry_id in ids:
            by_namespace.setdefault(namespace_of(entry_id), []).append(entry_id)
        await self._run(
            [
                ("ZREM", _HITS, *ids),
                *(("ZREM", _of_model(model), *ids) for model in models),
                *(("ZREM", _of_namespace(namespace), *theirs) for namespace, theirs in by_namespace.items()),
            ]
        )

    def discard(self, purge: Purge) -> None:
        if purge.scope == "layer":  # the layers have their own
            return
        self._stored = OrderedDict(
            (entry_id, stored)
            for entry_id, stored in self._stored.items()
            if not purge.covers(namespace_of(entry_id), stored.model, stored.created)
        )

    async def purged(self, purge: Purge) -> None:
        """Removes the sets of the scope; members of other sets are found out later."""
        self.discard(purge)
        match purge.scope:
            case "model":
                await self._run([("UNLINK", _of_model(purge.name)), ("SREM", _MODELS, purge.name)])
            case "namespace":
                await self._forget_namespace(purge.name)
            case "tags" | "tag" | "layer":
                pass  # the sets do not know tags, and the layers have their own
            case "before":
                models, namespaces = await self._members(_MODELS), await self._members(_NAMESPACES)
                names = [*map(_of_model, models), *map(_of_namespace, namespaces)]
                for batch in _batches(names):
                    await self._run([("ZREMRANGEBYSCORE", name, "-inf", f"({purge.token}") for name in batch])
            case "all":
                models, namespaces = await self._members(_MODELS), await self._members(_NAMESPACES)
                names = [*map(_of_model, models), *map(_of_namespace, namespaces), *map(_like, namespaces)]
                for batch in _batches([_HITS, _MODELS, _NAMESPACES, *names]):
                    await self._run([("UNLINK", each) for each in batch])

    async def _forget_namespace(self, namespace: str) -> None:
        """Also from the sets of models and hits: an id says whose it is."""
        name = _of_namespace(namespace)
        while True:
            (reply,) = await self._run([("ZRANGE", name, 0, _MEMBERS_PER_COMMAND - 1)])
            if not reply:
                break
            await self.forget([entry_id.decode() for entry_id in reply])
        await self._run([("UNLINK", _like(namespace)), ("SREM", _NAMESPACES, namespace)])

    async def sweep_forever(self) -> None:
        """Look for members whose entry is gone, some hundreds a second, in one process of all that share the Redis."""
        while True:
            with contextlib.suppress(StoreUnavailable):
                if await self._is_sweeper():
                    await self.sweep()
            await asyncio.sleep(_ROUND_SECONDS)

    async def sweep(self, pause: float = _SWEEP_SECONDS) -> None:
        """One round over all members. Raises StoreUnavailable."""
        async for registry, owner, name in self._sets():
            place = 0
            while True:
                (reply,) = await self._run([("ZRANGE", name, place, place + _SWEPT_AT_ONCE - 1)])
                if not reply:
                    break
                members = [member.decode() for member in reply]
                gone = await self._gone(name, members)
                if gone:
                    await self._run([("ZREM", name, *gone)])
                place += len(members) - len(gone)
                if pause:
                    await asyncio.sleep(pause)
                    if not await self._is_sweeper():
                        return
            if not place and registry:
                await self._run([("SREM", registry, owner)])
        await self._run([("ZREMRANGEBYRANK", _HITS, 0, -_MAX_HITS - 1)])

    async def _gone(self, name: str, members: Sequence[str]) -> list[str]:
        """The members whose entry does not exist."""
        like = _PREFIX + "like:"
        ids = members
        if name.startswith(like):
            namespace = name.removeprefix(like)
            ids = [f"{namespace}.{member.partition('.')[2]}" for member in members]
        exist = await self._run([("EXISTS", _ENTRY + entry_id) for entry_id in ids])
        # An entry that is being written is in the index before it is in Redis.
        return [
            member
            for member, entry_id, exists in zip(members, ids, exist, strict=True)
            if not exists and not self._redis.is_pending(entry_id)
        ]

    async def _sets(self) -> AsyncIterator[tuple[str, str, str]]:
        """(registry, name in it, key) of each sorted set."""
        for registry, keys in ((_MODELS, (_of_model,)), (_NAMESPACES, (_of_namespace, _like))):
            for owner in await self._members(registry):
                for key in keys:
                    yield registry if key is not _like else "", owner, key(owner)
        yield "", "", _HITS

    async def _is_sweeper(self) -> bool:
        """Whether this process is the one that sweeps, and goes on to be it."""
        taken, holder = await self._run([("SET", _SWEEPER, self._me, "NX", "EX", _SWEEPER_SECONDS), ("GET", _SWEEPER)])
        if not taken and holder != self._me.encode():
            return False
        await self._run([("EXPIRE", _SWEEPER, _SWEEPER_SECONDS)])
        return True

    async def _members(self, registry: str) -> list[str]:
        (reply,) = await self._run([("SMEMBERS", registry)])
        return sorted(member.decode(errors="surrogateescape") for member in reply)

    async def _run(self, commands: Sequence[Command]) -> list[Any]:
        """The replies to commands. Raises StoreUnavailable."""
        if not commands:
            return []
        replies = await self._redis.commands(commands, _DEADLINE)
        for reply in replies:
            if isinstance(reply, Exception):
                raise StoreUnavailable(f"redis: {reply}") from reply
        return replies


def _additions(stored: Mapping[str, _Stored]) -> list[Command]:
    sets: dict[str, list[Any]] = {}
    models: set[str] = set()
    namespaces: set[str] = set()
    for entry_id, (model, created, asked) in stored.items():
        namespace, _, rest = entry_id.partition(".")
        models.add(model)
        namespaces.add(namespace)
        sets.setdefault(_of_model(model), []).extend((repr(created), entry_id))
        sets.setdefault(_of_namespace(namespace), []).extend((repr(created), entry_id))
        known = decode_fingerprint(asked)
        if known is not None and known.question:
            sets.setdefault(_like(namespace), []).extend((0, f"{known.question.hex()}.{rest}"))
    commands: list[Command] = [("SADD", _MODELS, *models), ("SADD", _NAMESPACES, *namespaces)]
    for name, pairs in sets.items():
        commands += [("ZADD", name, *batch) for batch in _batches(pairs, 2 * _MEMBERS_PER_COMMAND)]
    return commands


def _batches(items: Sequence[Any], size: int = _MEMBERS_PER_COMMAND) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _scored(reply: Any) -> list[tuple[float, str]]:
    """(score, id) of a reply WITHSCORES: a flat list in RESP2, pairs in RESP3."""
    if reply and isinstance(reply[0], list):
        return [(float(score), member.decode()) for member, score in reply]
    return [(float(score), member.decode()) for member, score in zip(reply[::2], reply[1::2], strict=True)]


def _read_cursor(cursor: str) -> tuple[float, str]:
    score, _, entry_id = cursor.partition(" ")
    try:
        return float(score), entry_id
    except ValueError as error:
        raise InvalidCursor(cursor) from error


def _score(value: float) -> str:
    return {math.inf: "+inf", -math.inf: "-inf"}.get(value, repr(value))


def _of_model(model: str) -> str:
    return f"{_PREFIX}model:{model}"


def _of_namespace(namespace: str) -> str:
    return f"{_PREFIX}namespace:{namespace}"


def _like(namespace: str) -> str:
    return f"{_PREFIX}like:{namespace}"
