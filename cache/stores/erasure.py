"""Erasing a namespace from Redis: every key that belongs to it is looked for, removed, and looked for again."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from redis.exceptions import RedisError

from cache.errors import StoreUnavailable
from cache.stores.redis_connections import Command
from cache.stores.redis_store import RedisStore

# What begins with a namespace and a dot after these: entries, conversations, questions of the semantic cache, and
# the entries that were served a moment ago.
_PREFIXES = ("keepgate:entry:", "keepgate:response:", "keepgate:semantic:record:", "keepgate:served:")
_SEMANTIC_IDS = "keepgate:semantic:records"  # a sorted set of entries
_AT_ONCE = 500
_SECONDS = 2.0
# Between two steps, so that lookups pass.
_PAUSE = 0.005
# What other workers were writing may arrive after the first removal; a purge reaches them at once.
_MAX_PASSES = 5
_PASS_PAUSE = 0.2


@dataclass(frozen=True, slots=True)
class Erased:
    """How many keys were found and removed, and how many the last scan still found."""

    found: int
    removed: int
    remaining: int


async def erase_namespace(redis: RedisStore, namespace: str) -> Erased:
    """Removes every key of a namespace, whose entries must have been purged before. Raises StoreUnavailable."""
    found = removed = 0
    for _ in range(_MAX_PASSES):
        seen, gone = await _erase(redis, namespace)
        if seen == 0:
            return Erased(found, removed, 0)
        found += seen
        removed += gone
        await asyncio.sleep(_PASS_PAUSE)
    return Erased(found, removed, await _count(redis, namespace))


async def _erase(redis: RedisStore, namespace: str) -> tuple[int, int]:
    found = removed = 0
    for prefix in _PREFIXES:
        async for names in _names(redis, prefix, namespace):
            found += len(names)
            for batch in _batches(names):
                removed += await _total(redis, [("UNLINK", name) for name in batch])
    members = await _semantic_ids(redis, namespace)
    for batch in _batches(members):
        removed += await _total(redis, [("ZREM", _SEMANTIC_IDS, member) for member in batch])
        await asyncio.sleep(_PAUSE)
    return found + len(members), removed


async def _count(redis: RedisStore, namespace: str) -> int:
    found = 0
    for prefix in _PREFIXES:
        async for names in _names(redis, prefix, namespace):
            found += len(names)
    return found + len(await _semantic_ids(redis, namespace))


async def _names(redis: RedisStore, prefix: str, namespace: str) -> AsyncIterator[list[str]]:
    begin = f"{prefix}{namespace}."
    async for names in redis.scan(pattern(prefix, namespace)):
        yield [name for name in names if name.startswith(begin)]
        await asyncio.sleep(_PAUSE)


async def _semantic_ids(redis: RedisStore, namespace: str) -> list[bytes]:
    found: list[bytes] = []
    cursor: bytes | str = "0"
    while True:
        command: Command = ("ZSCAN", _SEMANTIC_IDS, cursor, "MATCH", pattern("", namespace), "COUNT", _AT_ONCE)
        cursor, members = await redis.command(command, _SECONDS)
        found += members[::2]
        if cursor == b"0":
            return found
        await asyncio.sleep(_PAUSE)


async def _total(redis: RedisStore, commands: list[Command]) -> int:
    replies = await redis.commands(commands, _SECONDS)
    for reply in replies:
        if isinstance(reply, RedisError):
            raise StoreUnavailable(f"redis: {reply}")
    return sum(replies)


def _batches(names: "list[str] | list[bytes]") -> "Iterator[list[str] | list[bytes]]":
    return (names[start : start + _AT_ONCE] for start in range(0, len(names), _AT_ONCE))


def pattern(prefix: str, namespace: str) -> str:
    """The glob of all keys of a namespace: none of its own characters is special."""
    return prefix + re.sub(r"([*?\[\]\\^-])", r"\\\1", namespace) + ".*"
