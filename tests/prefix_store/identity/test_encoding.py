"""The encoding under every digest."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.identity.encoding import Value, encoded

_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_values = st.recursive(_scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


def typed(value: object) -> object:
    """A form of the value in which Python's == distinguishes types and signs of zero."""
    if isinstance(value, dict):
        return ("mapping", frozenset((key, typed(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(map(typed, value)))
    sign = math.copysign(1, value) if isinstance(value, float) else 0
    return (type(value).__name__, value, sign)


@given(_values, _values)
def test_two_values_have_one_encoding_exactly_if_they_are_equal(one: Value, other: Value) -> None:
    """Encodings are equal exactly if type and value are."""
    assert (encoded(one) == encoded(other)) == (typed(one) == typed(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["ab", "c"], ["a", "bc"]),
        (["a"], [["a"]]),
        ([], ""),
        (None, ""),
        ("1", 1),
        (1, 1.0),
        (1, True),
        (b"a", "a"),
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}),
        (["a", 1], {"a": 1}),
        ([["a"], []], [[], ["a"]]),
    ],
)
def test_nothing_moves_over_a_border(one: Value, other: Value) -> None:
    """Values whose concatenated contents are equal differ."""
    assert encoded(one) != encoded(other)


def test_the_order_of_a_mapping_is_nothing() -> None:
    """The order of keys does not change the encoding."""
    assert encoded({"a": 1, "b": [2]}) == encoded({"b": (2,), "a": 1})


@pytest.mark.parametrize(("value", "error"), [(math.nan, ValueError), ({1: 2}, TypeError), ({"a": {3}}, TypeError)])
def test_what_cannot_be_told_apart_is_refused(value: object, error: type[Exception]) -> None:
    """NaN, keys that are not strings, and sets are refused."""
    with pytest.raises(error):
        encoded(value)  # type: ignore[arg-type]
