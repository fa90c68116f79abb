"""Arguments of tool calls are texts in one API and objects in the other."""

import json
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.surfaces.messages.arguments import ObjectEnd, arguments_of, input_of
from tests.gateway.surfaces.messages.answer_examples import inputs

quotes = st.text(st.sampled_from('\\"{}[] a'), max_size=8)


@given(inputs | st.dictionaries(quotes, quotes | st.lists(quotes)), st.data())
@settings(max_examples=200, deadline=None)
def test_the_end_of_an_object_is_found_where_it_is(value: dict[str, Any], data: st.DataObject) -> None:
    """However the text of an object is cut, its end is reached with its last brace and not before."""
    text = json.dumps(value)
    end = ObjectEnd()
    borders = sorted(data.draw(st.sets(st.integers(0, len(text) - 1))) | {0, len(text) - 1})
    for start, stop in pairwise(borders):
        end.add(text[start:stop])
        end.add("")
    assert not end.reached
    end.add(text[-1])
    assert end.reached


@given(inputs)
@settings(max_examples=100, deadline=None)
def test_an_input_comes_back_from_its_arguments(value: dict[str, Any]) -> None:
    """An object is the same as arguments, even one that looks like arguments that are no object."""
    assert json.dumps(input_of(arguments_of(value))) == json.dumps(value)


def test_no_arguments_are_an_empty_object() -> None:
    """Some servers send nothing for a call without arguments."""
    assert input_of("") == {}
    assert arguments_of({}) == "{}"
