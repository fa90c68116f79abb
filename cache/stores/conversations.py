"""Responses that clients continue by their ids: in Redis, shared by workers and hosts, or in this process without one.

A conversation is no cache entry: without it a request has no answer. So a save has arrived when it returns, and a
Redis that does not answer is an error.
"""

import asyncio
import hashlib
import logging
import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from cache.entries.checksum import checked_payload, with_checksum
from cache.errors import CorruptEntry, StoreUnavailable, Undecryptable
from cache.stores.redis_store import RedisStore

log = logging.getLogger(__name__)

_MAGIC = b"KGR1"
_PREFIX = "keepgate:response:"
_MAX_RECORD_BYTES = 32 * 2**20
# A long one takes milliseconds to compress and to hash: it leaves the event loop. A short one gains nothing.
_LARGE_BYTES = 2**14
_MEMORY_BYTES = 64 * 2**20
_LOAD_DEADLINE = 2.0  # without a conversation there is no answer
_SAVE_DEADLINE = 0.1  # with an answer, its client does not wait long for what another request may need
_MAX_SECONDS = 100 * 365 * 86_400.0


class Record(msgspec.Struct, frozen=True):
    """A response and the items that it answered, in the form of the Responses API.

    `input` has the whole conversation before the response, however much of it the client sent. `entry` is the cache's
    entry of the answer: a response that is forgotten must not be served again under an id that leads nowhere.
    """

    input: list[dict[str, Any]]
    response: dict[str, Any]
    entry: str = ""

    @property
    def items(self) -> list[dict[str, Any]]:
        """The conversation up to the end of the response."""
        return [*self.input, *self.response["output"]]


_record_encoder = msgspec.json.Encoder()
_record_decoder = msgspec.json.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _record_encoder.encode(record)


def decode_record(data: bytes) -> Record:
    """The inverse of `encode_record`. Raises CorruptEntry for anything else."""
    try:
        record = _record_decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptEntry(f"a stored response does not decode: {error}") from error
    output = record.response.get("output")
    if not isinstance(output, list) or not all(isinstance(item, dict) for item in output):
        raise CorruptEntry("a stored response has no output")
    return record


class _Value(msgspec.Struct, frozen=True, array_like=True):
    """What is stored: a record, and whose and which it is."""

    namespace: str
    response_id: str
    is_compressed: bool
    record: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Value)


class Conversations:
    """Records by namespace and id of the response, each for `keep_for` seconds.

    Without `redis` at most `capacity` bytes are kept, the least recently used go first, and other processes do not
    see them.
    """

    def __init__(
        self,
        redis: RedisStore | None,
        keep_for: float,
        capacity: int = _MEMORY_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._redis = redis
        self._keep_for = keep_for
        self._memory = _Memory(capacity, clock)
        self.corrupt_records = 0
        self.undecryptable = 0

    async def save(self, namespace: str, response_id: str, record: bytes) -> None:
        """Keep a record, in place of an older one. Raises StoreUnavailable if it could not be kept."""
        if len(record) > _MAX_RECORD_BYTES:
            raise StoreUnavailable(f"a conversation of {len(record)} bytes is too long to be kept")
        key = _key(namespace, response_id)
        value = await _aside(len(record), _encode, namespace, response_id, record)
        if self._redis is None:
            self._memory.put(key, value, self._keep_for)
        else:
            milliseconds = max(1, round(min(self._keep_for, _MAX_SECONDS) * 1000))
            sealed = await self._redis.encryption.seal(key, value)
            await self._redis.command(("SET", key, sealed, "PX", milliseconds), _SAVE_DEADLINE)

    async def load(self, namespace: str, response_id: str) -> bytes | None:
        """The record, or None if there is none; a corrupt one counts as none. Raises StoreUnavailable."""
        key = _key(namespace, response_id)
        redis = self._redis
        if redis is None:
            value = self._memory.get(key)
        else:
            value = await redis.patiently(lambda left: redis.command(("GET", key), left), _LOAD_DEADLINE)
        if value is None:
            return None
        try:
            if redis is not None:
                value = await redis.encryption.open(key, value)
            return await _aside(len(value), _decode, namespace, response_id, value)
        except Undecryptable as error:
            self.undecryptable += 1
            log.warning("a stored response does not count: %s", error)
            return None
        except CorruptEntry as error:
            self.corrupt_records += 1
            log.warning("a stored response does not count: %s", error)
            return None

    async def delete(self, namespace: str, response_id: str) -> bool:
        """Removes a record; False if there was none. Raises StoreUnavailable."""
        key = _key(namespace, response_id)
        if self._redis is None:
            return self._memory.drop(key)
        return bool(await self._redis.command(("UNLINK", key), _LOAD_DEADLINE))

    def forget(self, namespace: str) -> int:
        """Removes a namespace's records from this process; returns how many. Those in Redis: see erasure.py."""
        return self._memory.drop_all(f"{_PREFIX}{namespace}.")


class _Memory:
    """Values of at most `capacity` bytes."""

    def __init__(self, capacity: int, clock: Callable[[], float]) -> None:
        self._capacity = capacity
        self._clock = clock
        self._values: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._size = 0

    def get(self, key: str) -> bytes | None:
        value, expires = self._values.get(key, (None, 0.0))
        if value is not None and expires <= self._clock():
            self.drop(key)
            return None
        if value is not None:
            self._values.move_to_end(key)
        return value

    def put(self, key: str, value: bytes, keep_for: float) -> None:
        """Keep a value, unless it alone is too long; the least recently used make room."""
        self.drop(key)
        if _size(key, value) > self._capacity:
            return
        self._values[key] = (value, self._clock() + keep_for)
        self._size += _size(key, value)
        while self._size > self._capacity:
            self.drop(next(iter(self._values)))

    def drop(self, key: str) -> bool:
        value, expires = self._values.pop(key, (None, 0.0))
        if value is None:
            return False
        self._size -= _size(key, value)
        return expires > self._clock()

    def drop_all(self, prefix: str) -> int:
        return sum([self.drop(key) for key in list(self._values) if key.startswith(prefix)])


def _size(key: str, value: bytes) -> int:
    return sys.getsizeof(key) + sys.getsizeof(value) + 200  # the tuple, the float and the cells of the dict


def _key(namespace: str, response_id: str) -> str:
    """Raises ValueError for a namespace with a dot. An id is the client's to choose, and of any length."""
    if "." in namespace:
        raise ValueError(f"namespace {namespace!r}: a dot ends a namespace, so none can stand in it")
    digest = hashlib.blake2b(response_id.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()
    return f"{_PREFIX}{namespace}.{digest}"


async def _aside(size: int, work: Callable[[str, str, bytes], bytes], *arguments: Any) -> bytes:
    return await asyncio.to_thread(work, *arguments) if size > _LARGE_BYTES else work(*arguments)


def _encode(namespace: str, response_id: str, record: bytes) -> bytes:
    """MessagePack, with a checksum."""
    is_large = len(record) > _LARGE_BYTES
    value = _Value(namespace, response_id, is_large, zlib.compress(record, 1) if is_large else record)
    return with_checksum(_MAGIC, _encoder.encode(value))


def _decode(namespace: str, response_id: str, data: bytes) -> bytes:
    """The inverse of `_encode`. Raises CorruptEntry for anything else, and for another response's value."""
    try:
        value = _decoder.decode(checked_payload(_MAGIC, data))
        if (value.namespace, value.response_id) != (namespace, response_id):
            raise CorruptEntry("stored bytes are another response")
        if not value.is_compressed:
            return value.record
        decompressor = zlib.decompressobj()
        record = decompressor.decompress(value.record, _MAX_RECORD_BYTES)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, zlib.error) as error:
        raise CorruptEntry(f"stored bytes do not decode: {error}") from error
    if not decompressor.eof:
        raise CorruptEntry("stored bytes are too long, or not whole")
    return record
