"""The records of the entries that the semantic cache may serve."""

import heapq
from collections.abc import Iterator

import msgspec
import xxhash

from cache.entries.key import namespace_of
from cache.semantic.judge.answer import AnswerClass
from cache.semantic.normal_form.normal_form import normal_form


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One question that was answered.

    `entry` is the id of the answer in the store, `answer` that of the first entry with an equal answer. `partition` is
    the question's context (see `Question`). `confirmed` names the other tenants that got the same fresh answer. The
    record is of the answer that was computed at `created`, and is valid until `expires` (both in Unix seconds), only
    under its purge state, `generation`.

    `answers` is the class of its answer, and `disagreement` the evidence that answers to this very question disagree,
    in log odds.
    """

    entry: str
    partition: str
    text: str
    answer: str
    model: str
    generation: str
    created: float
    expires: float
    confirmed: tuple[str, ...] = ()
    answers: AnswerClass = "prose"
    disagreement: float = 0.0

    @property
    def namespace(self) -> str:
        return namespace_of(self.entry)

    @property
    def context(self) -> str:
        """The partition without its tenant."""
        return self.partition.partition(".")[2]


class Records:
    """All records by entry, by normal form, and in the order in which they expire and were used."""

    def __init__(self) -> None:
        self._by_entry: dict[str, Record] = {}
        self._by_form: dict[int, str] = {}
        self._expiring: list[tuple[float, str]] = []
        # Strings that thousands of records share are stored once.
        self._shared: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._by_entry)

    def __iter__(self) -> Iterator[Record]:
        return iter(list(self._by_entry.values()))

    def get(self, entry: str) -> Record | None:
        return self._by_entry.get(entry)

    def put(self, record: Record) -> Record:
        """Keep the record in place of an older one of its entry; returns it as it is kept."""
        self.remove(record.entry)
        shared = {
            name: self._shared.setdefault(getattr(record, name), getattr(record, name))
            for name in ("partition", "model", "generation")
        }
        record = msgspec.structs.replace(record, **shared)
        self._by_entry[record.entry] = record
        if (form := _form_of(record.partition, record.text)) is not None:
            self._by_form[form] = record.entry
        heapq.heappush(self._expiring, (record.expires, record.entry))
        if len(self._expiring) > 2 * len(self._by_entry) + 1000:
            self._expiring = [(kept.expires, kept.entry) for kept in self._by_entry.values()]
            heapq.heapify(self._expiring)
        if len(self._shared) > 3 * len(self._by_entry) + 1000:
            self._shared.clear()
        return record

    def remove(self, entry: str) -> Record | None:
        """The removed record."""
        record = self._by_entry.pop(entry, None)
        if record is not None:
            form = _form_of(record.partition, record.text)
            if form is not None and self._by_form.get(form) == entry:
                del self._by_form[form]
        return record

    def confirm(self, entry: str, created: float, namespace: str) -> bool:
        """Notes that another tenant got the same fresh answer; False if that was known, or there is no record."""
        record = self._by_entry.get(entry)
        if (
            record is None
            or record.created != created
            or namespace in record.confirmed
            or namespace == record.namespace
        ):
            return False
        self._by_entry[entry] = msgspec.structs.replace(record, confirmed=(*record.confirmed, namespace))
        return True

    def learn(self, entry: str, created: float, answer: str, disagreement: float) -> Record | None:
        """Sets what a judge has found out about a record; returns it as it is kept, None if there is none."""
        record = self._by_entry.get(entry)
        if record is None or record.created != created:
            return None
        found = msgspec.structs.replace(record, answer=answer, disagreement=disagreement)
        self._by_entry[entry] = found
        return found

    def use(self, entry: str) -> None:
        """Notes a use of the record: the least recently used one is evicted first."""
        record = self._by_entry.pop(entry, None)
        if record is not None:
            self._by_entry[entry] = record

    def oldest(self) -> str | None:
        return next(iter(self._by_entry), None)

    def of_same_form(self, partition: str, text: str, now: float) -> Record | None:
        """The record of a question that differs in case, white space or end punctuation at most."""
        form = _form_of(partition, text)
        record = self._by_entry.get(self._by_form.get(form, "")) if form is not None else None
        if record is None or record.partition != partition or record.expires <= now:
            return None
        return record if normal_form(record.text) == normal_form(text) else None

    def pop_expired(self, now: float, most: int) -> list[str]:
        """Up to `most` expired entries; they are still to be removed."""
        gone: dict[str, None] = {}
        while self._expiring and self._expiring[0][0] <= now and len(gone) < most:
            expires, entry = heapq.heappop(self._expiring)
            record = self._by_entry.get(entry)
            if record is not None and record.expires == expires:
                gone[entry] = None
        return list(gone)


def _form_of(partition: str, text: str) -> int | None:
    """A hash of the normal form of a question; None if every character may matter."""
    form = normal_form(text)
    return None if form is None else xxhash.xxh3_64_intdigest(f"{partition}\0{form}".encode("utf-8", "surrogatepass"))
