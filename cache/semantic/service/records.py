"""The records of the entries that the semantic cache may serve, in memory and as bytes for Redis."""

import heapq
from collections.abc import Iterator
from itertools import islice
from sys import intern
from typing import Annotated, Any

import msgspec
import numpy as np

from cache.entries.checksum import checked_payload, with_checksum
from cache.entries.key import namespace_of
from cache.errors import CorruptEntry
from cache.semantic.embedding.encoder import Vector
from cache.semantic.judge.answer import AnswerClass
from cache.semantic.messages import MAX_TEXT
from cache.semantic.normal_form.normal_form import normal_form

_MAGIC = b"KGS1"
# Records that expire within the same seconds are found expired together, when these are over.
_SPAN_SECONDS = 5.0


# Unix seconds, to far beyond every expiry that Redis takes in milliseconds.
_Time = Annotated[float, msgspec.Meta(gt=-1e11, lt=1e11)]


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One question that was answered.

    `entry` is the id of the answer in the store, `answer` the name of what it says: entry and time of the first answer
    that is equal. The policy may have joined that with another. `partition` is the question's context (see `Question`).
    `confirmed` names the other tenants that got the same fresh answer. The record is of the answer that was computed at
    `created`, and is valid until `expires` (both in Unix seconds), only under its purge state, `generation`.

    `answers` is the class of its answer, and `disagreement` the evidence that answers to this very question disagree,
    in log odds.
    """

    entry: str
    partition: str
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    answer: str
    model: str
    generation: str
    created: _Time
    expires: _Time
    confirmed: tuple[str, ...] = ()
    answers: AnswerClass = "prose"
    disagreement: float = 0.0

    @property
    def namespace(self) -> str:
        return namespace_of(self.entry)


class Records:
    """All records by entry, the least recently used first, by normal form, and by when they expire."""

    def __init__(self) -> None:
        self._by_entry: dict[str, Record] = {}
        self._by_form: dict[int, str] = {}
        self._by_span: dict[float, set[str]] = {}
        self._spans: list[float] = []  # a heap of all of them; of a span that is to come the set may be empty

    def __len__(self) -> int:
        return len(self._by_entry)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._by_entry.values())

    def get(self, entry: str) -> Record | None:
        return self._by_entry.get(entry)

    def put(self, record: Record) -> Record:
        """Keep the record in place of an older one of its entry; returns it as it is kept."""
        self.remove(record.entry)
        # Strings that thousands of records share are stored once.
        shared = {name: intern(getattr(record, name)) for name in ("partition", "model", "generation")}
        record = self._by_entry[record.entry] = msgspec.structs.replace(record, **shared)
        if (form := _form_of(record.partition, record.text)) is not None:
            self._by_form[form] = record.entry
        if (span := record.expires // _SPAN_SECONDS) not in self._by_span:
            heapq.heappush(self._spans, span)
            self._by_span[span] = set()
        self._by_span[span].add(record.entry)
        return record

    def remove(self, entry: str) -> None:
        """Nothing happens if there is none."""
        record = self._by_entry.pop(entry, None)
        if record is not None:
            form = _form_of(record.partition, record.text)
            if form is not None and self._by_form.get(form) == entry:
                del self._by_form[form]
            self._by_span[record.expires // _SPAN_SECONDS].remove(entry)

    def change(self, entry: str, created: float, **changes: Any) -> Record | None:
        """Sets fields of a record; returns it as it is kept, None if there is none of the answer of `created`."""
        record = self._by_entry.get(entry)
        if record is None or record.created != created:
            return None
        changed = self._by_entry[entry] = msgspec.structs.replace(record, **changes)
        return changed

    def use(self, entry: str) -> None:
        """Notes a use of the record: the least recently used one is evicted first."""
        record = self._by_entry.pop(entry, None)
        if record is not None:
            self._by_entry[entry] = record

    def oldest(self) -> str | None:
        return next(iter(self._by_entry), None)

    def expired(self, now: float, most: int) -> list[str]:
        """Up to `most` entries that have expired, some seconds ago maybe; they are still to be removed."""
        while self._spans and self._spans[0] < now // _SPAN_SECONDS:
            if entries := self._by_span[self._spans[0]]:
                return list(islice(entries, most))
            del self._by_span[heapq.heappop(self._spans)]
        return []

    def of_same_form(self, partition: str, text: str, now: float) -> Record | None:
        """The record of a question that has the same normal form."""
        form = _form_of(partition, text)
        record = self._by_entry.get(self._by_form.get(form, "")) if form is not None else None
        if record is None or record.partition != partition or record.expires <= now:
            return None
        return record if normal_form(record.text) == normal_form(text) else None


def _form_of(partition: str, text: str) -> int | None:
    """A hash of the normal form of a question; None if every character may matter."""
    form = normal_form(text)
    return None if form is None else hash((partition, form))


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """`encoder` is the embedding model's fingerprint, `vector` float32 [dimensions], little endian."""

    record: Record
    encoder: str
    vector: bytes


def encode_record(record: Record, vector: Vector, encoder: str) -> bytes:
    """MessagePack, with a checksum."""
    return with_checksum(_MAGIC, msgspec.msgpack.encode(_Stored(record, encoder, vector.astype("<f4").tobytes())))


def decode_record(data: bytes, entry: str, encoder: str, dimensions: int) -> tuple[Record, Vector | None]:
    """The record of `entry`, without a vector if that is not of `encoder`. Raises CorruptEntry."""
    payload = checked_payload(_MAGIC, data)
    try:
        record, of_encoder, stored = msgspec.structs.astuple(msgspec.msgpack.decode(payload, type=_Stored))
        vector = np.frombuffer(stored, dtype="<f4").astype(np.float32)
    # ValueError: a string that is not UTF-8, or a part of a number.
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise CorruptEntry(f"stored bytes do not decode: {error}") from error
    if record.entry != entry or namespace_of(record.partition) != record.namespace:
        raise CorruptEntry("stored bytes are of another entry")
    if of_encoder != encoder:
        return record, None
    if vector.shape != (dimensions,) or not abs(float(np.linalg.norm(vector)) - 1.0) < 1e-3:
        raise CorruptEntry("the vector is none of this model")
    return record, vector
