"""The checksum of values in Redis, so that damaged or foreign bytes are not taken for a value."""

import xxhash

from cache.errors import CorruptEntry

_DIGEST_BYTES = 8


def with_checksum(magic: bytes, payload: bytes) -> bytes:
    """`magic`, which names the kind of value, xxh3-64 of the payload (big endian), payload."""
    return magic + xxhash.xxh3_64_digest(payload) + payload


def checked_payload(magic: bytes, data: bytes) -> bytes:
    """The inverse of `with_checksum`. Raises CorruptEntry for anything else."""
    if not data.startswith(magic):
        raise CorruptEntry("stored bytes are not of this kind, or of another version")
    start = len(magic) + _DIGEST_BYTES
    payload = data[start:]
    if xxhash.xxh3_64_digest(payload) != data[len(magic) : start]:
        raise CorruptEntry("stored bytes fail their checksum")
    return payload
