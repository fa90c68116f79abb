"""Blocks and owners for tests of the index."""

import secrets
from collections.abc import Sequence

from prefix_store.identity.keys import KeyChain, root_key
from prefix_store.index.index import RedisIndex
from prefix_store.index.local_owner import CodecInventory, LocalOwner
from prefix_store.index.match import Match
from prefix_store.index.owner import TierKind

# Far more than the default, so that a busy machine does not fail other tests.
PATIENT = 5.0


def new_namespace() -> bytes:
    """A random namespace."""
    return secrets.token_bytes(16)


def chain(namespace: bytes, blocks: int, seed: int = 0) -> list[bytes]:
    """The keys of a prompt."""
    return KeyChain(root_key(namespace), 1).keys_of([seed, *range(1, blocks)])


class Shelf:
    """The blocks of a test's owner."""

    def __init__(self, *keys: bytes) -> None:
        self.keys = list(keys)

    def inventory(self) -> list[CodecInventory]:
        return [CodecInventory(0, list(self.keys))]


async def owner(index: RedisIndex, name: str, *keys: bytes, tier: TierKind = TierKind.MEMORY) -> LocalOwner:
    """An owner that has been announced and has claimed these blocks."""
    made = index.own(name, tier, Shelf(*keys).inventory)
    await index.next_heartbeat()
    if keys:
        made.publish(keys)
    await index.flush()
    return made


def outline(match: Match) -> list[tuple[int, set[str]]]:
    """(blocks, names of their holders), for each run."""
    return [(run.blocks, {holder.owner.name for holder in run.holders}) for run in match.runs]


def names(match: Match) -> Sequence[str]:
    """The first holder's name of each run."""
    return [run.holders[0].owner.name for run in match.runs]
