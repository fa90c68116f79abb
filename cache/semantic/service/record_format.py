"""A record and its vector as bytes for Redis, which are verified when they are decoded."""

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
    record: Record
    encoder: str
    vector: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Stored).decode


class RecordFormat:
    """Magic, xxh3-64 of the rest, and that rest as msgpack, with the vector as float32 [dimensions], little endian.

    `encoder` names the embedding model: vectors of others are not comparable.
    """

    def __init__(self, encoder: str, dimensions: int) -> None:
        self._encoder = encoder
        self._dimensions = dimensions

    def encode(self, record: Record, vector: Vector) -> bytes:
        stored = _encode(_Stored(record, self._encoder, vector.astype("<f4").tobytes()))
        return _MAGIC + xxhash.xxh3_64_digest(stored) + stored

    def decode(self, entry: str, data: bytes) -> tuple[Record, Vector | None]:
        """The record of `entry`, without a vector if that is of another model. Raises CorruptEntry."""
        payload = data[_HEADER_BYTES:]
        if data[: len(_MAGIC)] != _MAGIC or xxhash.xxh3_64_digest(payload) != data[len(_MAGIC) : _HEADER_BYTES]:
            raise CorruptEntry("stored bytes fail their checksum")
        try:
            stored = _decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CorruptEntry(f"stored bytes do not decode: {error}") from error
        record = stored.record
        if record.entry != entry or namespace_of(record.partition) != record.namespace:
            raise CorruptEntry("stored bytes are of another entry")
        if not (math.isfinite(record.created) and math.isfinite(record.expires)) or len(record.text) > MAX_TEXT:
            raise CorruptEntry("stored bytes are no record that this version keeps")
        if stored.encoder != self._encoder:
            return record, None
        vector = np.frombuffer(stored.vector, dtype="<f4").astype(np.float32)
        if vector.shape != (self._dimensions,) or not abs(float(np.linalg.norm(vector)) - 1.0) < 1e-3:
            raise CorruptEntry("the vector is none of this model")
        return record, vector
