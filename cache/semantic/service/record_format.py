"""A record and its vector as bytes for Redis: magic, xxh3-64 of the rest, and that rest as msgpack."""

import math

import msgspec
import numpy as np
import xxhash

from cache.entries.key import namespace_of
from cache.errors import CorruptEntry
from cache.semantic.messages import MAX_TEXT
from cache.semantic.service.neighbours import Vector
from cache.semantic.service.records import Record

_MAGIC = b"KGS1"
_HEADER_BYTES = len(_MAGIC) + 8


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """`encoder` is the embedding model's fingerprint, `vector` float32 [dimensions], little endian."""

    record: Record
    encoder: str
    vector: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Stored).decode


def encode_record(record: Record, vector: Vector, encoder: str) -> bytes:
    payload = _encode(_Stored(record, encoder, vector.astype("<f4").tobytes()))
    return _MAGIC + xxhash.xxh3_64_digest(payload) + payload


def decode_record(data: bytes, entry: str, encoder: str, dimensions: int) -> tuple[Record, Vector | None]:
    """The record of `entry`, without a vector if that is not of `encoder`. Raises CorruptEntry."""
    payload = data[_HEADER_BYTES:]
    if data[:_HEADER_BYTES] != _MAGIC + xxhash.xxh3_64_digest(payload):
        raise CorruptEntry("stored bytes fail their checksum")
    try:
        record, of_encoder, stored = msgspec.structs.astuple(_decode(payload))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptEntry(f"stored bytes do not decode: {error}") from error
    if record.entry != entry or namespace_of(record.partition) != record.namespace:
        raise CorruptEntry("stored bytes are of another entry")
    if not (math.isfinite(record.created) and math.isfinite(record.expires)) or len(record.text) > MAX_TEXT:
        raise CorruptEntry("stored bytes are no record that this version keeps")
    if of_encoder != encoder:
        return record, None
    vector = np.frombuffer(stored, dtype="<f4").astype(np.float32)
    if vector.shape != (dimensions,) or not abs(float(np.linalg.norm(vector)) - 1.0) < 1e-3:
        raise CorruptEntry("the vector is none of this model")
    return record, vector
