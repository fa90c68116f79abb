"""How many blocks each owner claims, counted in Redis: for operators and repairs, never on a request's path."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

from prefix_store.identity.keys import KEY_BYTES
from prefix_store.index.index import RedisIndex
from prefix_store.index.layout import claimed
from prefix_store.index.local_owner import LocalOwner

_NAMES_AT_ONCE = 1000
_DEADLINE = 5.0


class OwnerUsage(NamedTuple):
    """The owner of the counted claims; `owner` is empty for owners that are no longer alive."""

    owner: str
    tier: int
    codec: int


class IndexUsage(NamedTuple):
    """The result of one scan of a namespace. Blocks that were added or removed meanwhile may be in it or not."""

    blocks: int
    claims: Counter[OwnerUsage]


async def measure_usage(index: RedisIndex) -> IndexUsage:
    """Count a namespace's blocks by owner, tier and codec. Raises IndexUnavailable.

    Scans all names of the server in steps of a thousand (SCAN), so that no other client waits.
    """
    found: set[bytes] = set()
    claims: Counter[OwnerUsage] = Counter()
    async for key, value in _blocks(index):
        if key in found:  # SCAN may return a key twice
            continue
        found.add(key)
        for epoch, tier, codec, _ in claimed(value):
            owner = index.owners.get(epoch)
            claims[OwnerUsage(owner.name if owner else "", tier, codec)] += 1
    return IndexUsage(len(found), claims)


async def repair(index: RedisIndex, owner: LocalOwner) -> int:
    """Withdraws an owner's wrong claims in the index, and claims what it holds.

    Returns how many blocks were withdrawn. Without a repair wrong claims end when they expire. Raises IndexUnavailable.
    """
    await owner.claim_now()
    await index.flush()
    epoch = owner.epoch
    said = [key async for key, value in _blocks(index) if any(found[0] == epoch for found in claimed(value))]
    wrong = owner.not_held(said)
    owner.forget(wrong)
    await index.flush()
    return len(wrong)


async def _blocks(index: RedisIndex) -> AsyncIterator[tuple[bytes, bytes]]:
    """(key, claims) of every block of the namespace."""
    pattern, cursor = index.connection.block_names + b"*", 0
    while True:
        reply, names = await index.connection.command(
            "SCAN", cursor, "MATCH", pattern, "COUNT", _NAMES_AT_ONCE, deadline=_DEADLINE
        )
        cursor = int(reply)
        if names:
            values: list[bytes | None] = await index.connection.command("MGET", *names, deadline=_DEADLINE)
            for name, value in zip(names, values, strict=True):
                if value is not None:
                    yield name[-KEY_BYTES:], value
        if cursor == 0:
            return
