"""A patch makes one document of another, and nothing else is taken for a patch."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.surfaces.messages.json_patch import difference, patched

names = st.sampled_from(["", "a", "b", "/", "~", "~1", "-", "0"])
documents = st.dictionaries(
    names,
    st.recursive(
        st.sampled_from([None, True, 0, 1, 1.0, "", "text"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def exactly(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@given(documents, documents)
@settings(max_examples=300, deadline=None)
def test_a_patch_makes_one_document_of_another(wanted: dict[str, Any], given: dict[str, Any]) -> None:
    """Objects, lists, null, and numbers that are equal in Python come out exactly; the documents stay as they are."""
    before = exactly([wanted, given])
    patch = difference(wanted, given)
    assert exactly(patched(given, patch)) == exactly(wanted)
    assert (patch == []) == (exactly(wanted) == exactly(given))
    assert exactly([wanted, given]) == before


@given(documents, documents, documents)
@settings(max_examples=100, deadline=None)
def test_the_patch_of_another_document(wanted: dict[str, Any], given: dict[str, Any], other: dict[str, Any]) -> None:
    """A patch that does not fit is a ValueError, or makes some other document; it changes none."""
    before = exactly([wanted, given, other])
    patch = difference(wanted, given)
    try:
        made = patched(other, patch)
    except ValueError:
        return
    assert isinstance(made, dict)
    assert exactly([wanted, given, other]) == before


def test_a_text_under_another_name_is_copied() -> None:
    """A long text is in a patch by its name, before a change of what is under that name."""
    patch = difference({"a": None, "b": "long"}, {"a": "long"})
    assert patch == [
        {"op": "copy", "from": "/a", "path": "/b"},
        {"op": "replace", "path": "/a", "value": None},
    ]


@pytest.mark.parametrize(
    "patch",
    [
        5,
        {"op": "add"},
        ["add"],
        [{"op": "add", "path": "/a"}],
        [{"op": "add", "path": 5, "value": 1}],
        [{"op": "add", "path": "", "value": 1}],
        [{"op": "add", "path": "a", "value": 1}],
        [{"op": "add", "path": "/a/b/c", "value": 1}],
        [{"op": "add", "path": "/list/9", "value": 1}],
        [{"op": "test", "path": "/a", "value": "x"}],
        [{"op": "remove", "path": "/b"}],
        [{"op": "remove", "path": "/list/0"}],
        [{"op": "copy", "from": "/list", "path": "/b"}],
        [{"op": "copy", "from": "/b", "path": "/c"}],
    ],
)
def test_what_is_no_patch(patch: Any) -> None:
    """Anything else than what `difference` makes is refused."""
    with pytest.raises(ValueError, match=r".+"):
        patched({"a": "x", "list": [1, 2]}, patch)
