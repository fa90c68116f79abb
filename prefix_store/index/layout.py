"""Names and values in Redis; claims.lua is the counterpart."""

import base64
from collections.abc import Iterable, Sequence

from prefix_store.identity.keys import KEY_BYTES

EPOCH_BYTES = 6
_HELD_BYTES = 7
_TAG_BYTES = 9
_STR8, _ARRAY16 = 0xD9, 0xDC
_WRONG_KEY = "a block key has 16 bytes, as prefix_store.identity makes it"


def key_names(namespace: bytes) -> tuple[bytes, bytes, bytes]:
    """KEYS of every script: live, owners, and the prefix of blocks' names.

    All have one hash tag, made of the first 9 bytes of the namespace's fingerprint, so they are in one slot of a Redis
    Cluster. It has no braces and no glob characters.
    """
    tag = base64.urlsafe_b64encode(namespace[:_TAG_BYTES])
    live, owners, block = (b"keepgate:%s:{%s}" % (kind, tag) for kind in (b"live", b"owners", b"kv"))
    return live, owners, block


def joined(keys: Sequence[bytes]) -> bytes:
    """Concatenated block keys. Raises ValueError unless each has 16 bytes."""
    check_keys(keys)
    return b"".join(keys)


def packed_names(prefix: bytes, keys: Sequence[bytes]) -> bytes:
    """The names of up to 65,535 blocks as an array in MessagePack: all have the same prefix.

    Raises ValueError unless the keys have 16 bytes on average: a cheap check, for every request calls this, and keys of
    other lengths would not be found.
    """
    before = bytes([_STR8, len(prefix) + KEY_BYTES]) + prefix
    names = before.join((b"", *keys))
    if len(names) != (len(before) + KEY_BYTES) * len(keys):
        raise ValueError(_WRONG_KEY)
    return bytes([_ARRAY16]) + len(keys).to_bytes(2, "big") + names


def check_keys(keys: Sequence[bytes]) -> None:
    """Raises ValueError unless each of these has the length of a block key."""
    if not {KEY_BYTES}.issuperset(map(len, keys)):
        raise ValueError(_WRONG_KEY)


def packed_epoch(epoch: int) -> bytes:
    return epoch.to_bytes(EPOCH_BYTES, "big")


def packed_kind(tier: int, codec: int) -> bytes:
    return bytes([tier << 4 | codec])


def held(claims: bytes) -> Iterable[tuple[int, int, int]]:
    """(epoch, tier, codec) of claims as a match returns them."""
    for start in range(0, len(claims), _HELD_BYTES):
        kind = claims[start + EPOCH_BYTES]
        yield int.from_bytes(claims[start : start + EPOCH_BYTES], "big"), kind >> 4, kind & 15
