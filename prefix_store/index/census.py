"""Who claims how many blocks, counted in Redis itself: for people and repairs, never on the way of a request."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

from prefix_store.identity.keys import KEY_BYTES
from prefix_store.index.index import RedisIndex
from prefix_store.index.layout import claimed
from prefix_store.index.local_owner import LocalOwner

_NAMES_AT_ONCE = 1000
_DEADLINE = 5.0


class Share(NamedTuple):
    """Whose claims are counted: `owner` is a name, or empty for owners that are no longer alive."""

    owner: str
    tier: int
    codec: int


class Census(NamedTuple):
    """What one walk over a namespace has found. Blocks that came or went meanwhile may be in it or not."""

    blocks: int
    claims: Counter[Share]


async def take_census(index: RedisIndex) -> Census:
    """Count a namespace's blocks by owner, tier and codec. Raises IndexUnavailable.

    Walks over all names of the server in steps of a thousand (SCAN), so that nobody else waits for it.
    """
    found: set[bytes] = set()
    claims: Counter[Share] = Counter()
    async for key, value in _blocks(index):
        if key in found:  # SCAN may come by twice
            continue
        found.add(key)
        for epoch, tier, codec, _ in claimed(value):
            owner = index.owners.get(epoch)
            claims[Share(owner.name if owner else "", tier, codec)] += 1
    return Census(len(found), claims)


async def repair(index: RedisIndex, owner: LocalOwner) -> int:
    """Withdraw what the index believes an owner to hold and it does not, and claim what it holds.

    Returns how many blocks were withdrawn. Without it the index becomes right too, when the claims end. Raises
    IndexUnavailable.
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
    pattern, cursor = index.link.block_names + b"*", 0
    while True:
        reply, names = await index.link.command(
            "SCAN", cursor, "MATCH", pattern, "COUNT", _NAMES_AT_ONCE, deadline=_DEADLINE
        )
        cursor = int(reply)
        if names:
            values: list[bytes | None] = await index.link.command("MGET", *names, deadline=_DEADLINE)
            for name, value in zip(names, values, strict=True):
                if value is not None:
                    yield name[-KEY_BYTES:], value
        if cursor == 0:
            return
