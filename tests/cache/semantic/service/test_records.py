"""Records: by entry, by normal form, by use, by age, and as bytes."""

import timeit
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cache.errors import CorruptEntry
from cache.semantic.normal_form.normal_form import normal_form
from cache.semantic.service.records import Record, Records, decode_record, encode_record

TEXTS = ("How are you?", "how are you", "HOW ARE YOU", "Where is it?", "print(1)", "I have 3 cats")
PARTITIONS = ("a.1", "a.2", "b.1")


def record(entry: str, partition: str = "a.1", text: str = "How are you?", expires: float = 100.0) -> Record:
    return Record(entry, partition, text, entry, "m", "0.0.0", 5.0, expires)


class RecordsMachine(RuleBasedStateMachine):
    """Compares the records with a dictionary after each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.records = Records()
        self.model: dict[str, Record] = {}
        self.newest: dict[tuple[str, str], str] = {}

    @rule(
        number=st.integers(0, 5),
        partition=st.sampled_from(PARTITIONS),
        text=st.sampled_from(TEXTS),
        expires=st.integers(1, 700),
    )
    def put(self, number: int, partition: str, text: str, expires: int) -> None:
        new = record(f"a.{number}", partition, text, float(expires))
        self.drop(new.entry)
        self.records.put(new)
        self.model[new.entry] = new
        if (form := normal_form(text)) is not None:
            self.newest[partition, form] = new.entry

    @rule(number=st.integers(0, 5))
    def remove(self, number: int) -> None:
        self.records.remove(f"a.{number}")
        self.drop(f"a.{number}")

    def drop(self, entry: str) -> None:
        old = self.model.pop(entry, None)
        if old is not None and self.newest.get((old.partition, normal_form(old.text) or "")) == entry:
            del self.newest[old.partition, normal_form(old.text) or ""]

    @rule(number=st.integers(0, 5))
    def use(self, number: int) -> None:
        self.records.use(f"a.{number}")
        if f"a.{number}" in self.model:
            self.model[f"a.{number}"] = self.model.pop(f"a.{number}")

    @rule(now=st.integers(0, 700), most=st.integers(1, 3))
    def expire(self, now: int, most: int) -> None:
        due = {entry for entry, kept in self.model.items() if kept.expires <= now}
        long_due = {entry for entry in due if self.model[entry].expires <= now - 5}
        while gone := self.records.expired(float(now), most):
            assert len(gone) == len(set(gone)) <= most
            assert set(gone) <= due
            for entry in gone:
                self.records.remove(entry)
                self.drop(entry)
        assert not long_due & self.model.keys()

    @rule(number=st.integers(0, 5), answer=st.sampled_from(("a.0", "b.7")))
    def change(self, number: int, answer: str) -> None:
        kept = self.records.get(f"a.{number}")
        assert self.records.change(f"a.{number}", 6.0, answer=answer) is None, "that was another answer"
        new = self.records.change(f"a.{number}", 5.0, answer=answer, disagreement=1.0)
        assert new == (kept and msgspec.structs.replace(kept, answer=answer, disagreement=1.0))
        if new is not None:
            self.model[f"a.{number}"] = new

    @invariant()
    def same(self) -> None:
        assert len(self.records) == len(self.model)
        assert list(self.records) == list(self.model.values())
        assert self.records.oldest() == next(iter(self.model), None)

    @rule(partition=st.sampled_from(PARTITIONS), text=st.sampled_from(TEXTS))
    def find(self, partition: str, text: str) -> None:
        found = self.records.of_same_form(partition, text, 0.0)
        form = normal_form(text)
        expected = self.newest.get((partition, form)) if form is not None else None
        assert (found.entry if found else None) == expected


TestRecords = RecordsMachine.TestCase
TestRecords.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_an_expired_record_is_not_found() -> None:
    """An expired record is not found by its normal form, even before it is removed."""
    records = Records()
    records.put(record("a.1", expires=10.0))

    assert records.of_same_form("a.1", "how are you", 9.9) is not None
    assert records.of_same_form("a.1", "how are you", 10.0) is None


def test_a_string_that_records_share_is_kept_once() -> None:
    """Records of one partition share one string for its name."""
    records = Records()
    kept = [records.put(record(f"a.{number}", partition="".join(["a.", "1"]))) for number in range(3)]

    assert len({id(each.partition) for each in kept}) == 1


def test_records_that_expire_soon_are_not_looked_at_before() -> None:
    """However many expire in one minute, looking for expired ones takes no longer while there are none."""
    now = 1.2e9

    def took(count: int) -> float:
        records = Records()
        for number in range(count):
            records.put(record(f"a.{number}", text="print(1)", expires=now + 7 + number % 50))
        assert records.expired(now, 500) == []
        return min(timeit.repeat(lambda: records.expired(now, 500), repeat=5, number=100))

    assert took(20_000) < 20 * took(20)


def stored(*parts: Any, more: bytes = b"") -> bytes:
    """A record, an encoder's fingerprint and a vector as they lie in Redis, with another part that nobody knows."""
    payload = b"\x94" + msgspec.msgpack.encode(parts)[1:] + (more or b"\xc0")
    return b"KGS1" + xxhash.xxh3_64_digest(payload) + payload


def test_a_record_is_decoded_as_it_was() -> None:
    """With the vector of the same model, and without that of another; parts of later versions are skipped."""
    vector = np.eye(1, 4, dtype=np.float32)[0]
    kept = record("a.1")
    for data in (encode_record(kept, vector, "encoder"), stored(kept, "encoder", vector.tobytes())):
        decoded, found = decode_record(data, "a.1", "encoder", 4)
        assert decoded == kept
        assert found is not None
        np.testing.assert_array_equal(found, vector)
        assert decode_record(data, "a.1", "another", 4) == (kept, None)


@pytest.mark.parametrize(
    "data",
    [
        stored(record("a.1"), "encoder", b"abc"),
        stored(record("a.1"), "encoder", b"", more=b"\x91" * 100_000 + b"\xc0"),
        stored(record("a.1", expires=1e307), "another", b""),
        stored(record("a.1", expires=float("nan")), "another", b""),
    ],
    ids=["part of a number", "deep", "never", "nan"],
)
def test_a_record_of_foreign_bytes_is_corrupt(data: bytes) -> None:
    """Whatever its checksum: bytes that decode to no record of this version are a corrupt entry, and no other error."""
    with pytest.raises(CorruptEntry):
        decode_record(data, "a.1", "encoder", 4)
