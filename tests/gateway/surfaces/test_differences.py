"""The difference of two JSON values makes the one of the other."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.surfaces.differences import difference, patched

leaves = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, 1.0, "", "a", "b", "0", "long text"])
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["", "a", "b", "0", "1"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Whether they are one JSON text but for the order of names: 1, 1.0 and true differ."""
    return msgspec.json.encode(one, order="sorted") == msgspec.json.encode(other, order="sorted")


@settings(max_examples=500, deadline=None)
@given(values, values)
def test_a_difference_makes_one_value_of_another(before: Any, after: Any) -> None:
    """Also after a way through JSON text, and equal values have none."""
    change = difference(before, after)
    assert (change is None) == same(before, after)
    if change is not None:
        assert same(patched(before, msgspec.json.decode(msgspec.json.encode(change))), after)


@settings(max_examples=500, deadline=None)
@given(values, values)
def test_what_is_no_difference_is_refused_or_makes_a_value(value: Any, change: Any) -> None:
    """Any JSON in place of a difference gives a value or ValueError."""
    try:
        msgspec.json.encode(patched(value, change))
    except ValueError:
        return


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ({"a": 1, "b": [1, 2]}, {"b": [1, 3], "c": 4}, {"a": [], "b": {"1": [3]}, "c": [4]}),
        ({"a": "long"}, {"a": "long", "b": "long"}, {"b": "a"}),
        ({"a": "long"}, {"b": "long"}, {"a": [], "b": "a"}),
        ([1], [], {"0": []}),
        ({"a": []}, {"a": {}}, {"a": [{}]}),
        (1, 1.0, [1.0]),
        (1, True, [True]),
        ("x", "x", None),
    ],
)
def test_a_difference_says_only_what_differs(before: Any, after: Any, change: Any) -> None:
    """A text under a second name is not repeated."""
    assert difference(before, after) == change
