"""What an index claims, read from Redis, and the repair of one owner's claims."""

from collections.abc import Sequence

import redis.asyncio

from prefix_store.identity.keys import KEY_BYTES
from prefix_store.index.index import RedisIndex
from prefix_store.index.layout import EPOCH_BYTES
from prefix_store.store.owners import Owners

_CLAIM_BYTES = 11
_NAMES_AT_ONCE = 1_000


async def claims_by_owner(url: str, index: RedisIndex) -> dict[str, set[bytes]]:
    """Stored keys of blocks, by the name of the live owner that claims them."""
    found: dict[str, set[bytes]] = {}
    async with redis.asyncio.from_url(url) as plain:
        names = [name async for name in plain.scan_iter(index.connection.block_names + b"*", _NAMES_AT_ONCE)]
        for name, value in zip(names, await plain.mget(names) if names else (), strict=True):
            claims = value if isinstance(value, bytes) else b""
            for start in range(0, len(claims), _CLAIM_BYTES):
                epoch = int.from_bytes(claims[start : start + EPOCH_BYTES], "big")
                if epoch in index.owners:
                    found.setdefault(index.owners[epoch].name, set()).add(name[-KEY_BYTES:])
    return found


async def repair(url: str, owners: Owners, tier: str, name: str, held: Sequence[bytes]) -> None:
    """Claims what a tier of this process holds, under its owner's name, and withdraws that owner's other claims."""
    index = owners.index
    await index.next_heartbeat()
    await owners.publish(tier, held)
    await index.flush()
    (owner,) = (owner for owner in index.owners.values() if owner.name == name)
    wrong = (await claims_by_owner(url, index)).get(name, set()).difference(held)
    index.remove_claims(owner, list(wrong))
    await index.flush()
