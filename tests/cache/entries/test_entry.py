"""An entry comes back whole from its bytes, or not at all."""

import msgspec
import pytest
import xxhash
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cache.entries.entry import Entry, decode_entry, encode_entry
from cache.errors import CorruptEntry
from tests.cache.entries.entry_examples import entry

# No deadline: how busy the machine is says nothing about the code.
quick = settings(max_examples=50, deadline=None)

texts = st.text(st.characters(exclude_categories=["Cs"]))
seconds = st.floats(min_value=0, max_value=1e12)
counts = st.integers(0, 2**53)
entries = st.builds(
    Entry,
    id=texts,
    proof=st.binary(),
    family=st.sampled_from(["chat.completions", "completions"]),
    model=texts,
    body=st.binary(max_size=200),
    created=seconds,
    fresh_for=seconds,
    generation=texts,
    has_usage=st.booleans(),
    prompt_tokens=counts,
    completion_tokens=counts,
    seconds=seconds,
)
SAMPLE = encode_entry(entry(body=b'{"choices":[{"index":0}]}'))


@given(entries)
@quick
def test_an_entry_comes_back_from_its_bytes(kept: Entry) -> None:
    """An entry is equal to itself after encoding and decoding."""
    assert decode_entry(encode_entry(kept)) == kept


@given(st.integers(0, len(SAMPLE) * 8 - 1))
@quick
def test_one_flipped_bit_is_detected(bit: int) -> None:
    """An entry with any one bit flipped raises CorruptEntry."""
    damaged = bytearray(SAMPLE)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptEntry):
        decode_entry(bytes(damaged))


@pytest.mark.parametrize("length", range(len(SAMPLE)))
def test_a_cut_entry_is_detected(length: int) -> None:
    """An entry cut at any length raises CorruptEntry."""
    with pytest.raises(CorruptEntry):
        decode_entry(SAMPLE[:length])


@given(st.binary(min_size=1))
@quick
def test_bytes_behind_an_entry_are_detected(tail: bytes) -> None:
    """An entry with further bytes behind it raises CorruptEntry."""
    with pytest.raises(CorruptEntry):
        decode_entry(SAMPLE + tail)


@given(st.binary())
@quick
def test_arbitrary_bytes_are_no_entry(data: bytes) -> None:
    """Arbitrary bytes raise CorruptEntry."""
    assume(data != SAMPLE)
    with pytest.raises(CorruptEntry):
        decode_entry(data)


def sealed(payload: bytes) -> bytes:
    return b"KGE1" + xxhash.xxh3_64_digest(payload) + payload


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
    max_leaves=20,
)


NESTED = b"\x91" * 100_000
NESTED_BEHIND_THE_FIELDS = b"\x9d" + msgspec.msgpack.encode(entry())[1:] + b"\x91" * 100_000 + b"\x00"
TEXT_THAT_IS_NOT_UTF_8 = msgspec.msgpack.encode(entry()).replace(b"\xa1m", b"\xa1\xff")


@given(st.binary() | json_values.map(msgspec.msgpack.encode))
@example(NESTED)
@example(NESTED_BEHIND_THE_FIELDS)
@example(TEXT_THAT_IS_NOT_UTF_8)
@quick
def test_a_payload_that_is_no_entry_is_corrupt(payload: bytes) -> None:
    """A payload that is no entry raises CorruptEntry although its checksum is right."""
    with pytest.raises(CorruptEntry):
        decode_entry(sealed(payload))


def test_age_counts_from_the_computation_and_is_never_negative() -> None:
    """The age of an entry counts from its computation and is zero where the clock was set back."""
    kept = entry(created=1000.0)
    assert kept.age(1012.5) == 12.5
    assert kept.age(990.0) == 0.0
