"""An entry comes back whole from its bytes, or not at all."""

import msgspec
import pytest
import xxhash
from hypothesis import assume, given, settings
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
    """Nothing of it is lost."""
    assert decode_entry(encode_entry(kept)) == kept


@given(st.integers(0, len(SAMPLE) * 8 - 1))
@quick
def test_one_flipped_bit_is_seen(bit: int) -> None:
    """Wherever it is."""
    damaged = bytearray(SAMPLE)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptEntry):
        decode_entry(bytes(damaged))


@pytest.mark.parametrize("length", range(len(SAMPLE)))
def test_a_cut_entry_is_seen(length: int) -> None:
    """However much of it is left."""
    with pytest.raises(CorruptEntry):
        decode_entry(SAMPLE[:length])


@given(st.binary(min_size=1))
@quick
def test_bytes_behind_an_entry_are_seen(tail: bytes) -> None:
    """An entry ends where it ends."""
    with pytest.raises(CorruptEntry):
        decode_entry(SAMPLE + tail)


@given(st.binary())
@quick
def test_any_bytes_are_no_entry(data: bytes) -> None:
    """Whatever somebody else keeps in the same Redis is refused in one way."""
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


@given(st.binary() | json_values.map(msgspec.msgpack.encode))
@quick
def test_a_right_checksum_over_something_else_is_seen(payload: bytes) -> None:
    """A checksum says that bytes arrived, not that they are an entry."""
    with pytest.raises(CorruptEntry):
        decode_entry(sealed(payload))


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 100_000,
        b"\x9d" + msgspec.msgpack.encode(entry())[1:] + b"\x91" * 100_000 + b"\x00",
        msgspec.msgpack.encode(entry()).replace(b"\xa1m", b"\xa1\xff"),
    ],
    ids=["nested without end", "nested without end behind the fields", "text that is not UTF-8"],
)
def test_hostile_bytes_are_refused_in_the_same_way(payload: bytes) -> None:
    """Nothing that can be written to Redis raises anything but CorruptEntry."""
    with pytest.raises(CorruptEntry):
        decode_entry(sealed(payload))


def test_age_counts_from_the_computation_and_never_backwards() -> None:
    """A clock that was set back makes an entry new, not older than nothing."""
    kept = entry(created=1000.0)
    assert kept.age(1012.5) == 12.5
    assert kept.age(990.0) == 0.0
