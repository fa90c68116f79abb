"""A JSON Patch makes one document of another, exactly."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.surfaces.ollama.json_patch import difference, patched
from gateway.surfaces.surface import Json
from tests.gateway.surfaces.ollama.examples import exact, quick

_names = st.sampled_from(["a", "b", "~", "/", "~1", "a/b", "-", "0", ""])
_scalars = st.sampled_from([0, 0.0, False, None, 1, True, "", "long text", "another"])
_values = st.recursive(_scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3))
_documents = st.dictionaries(_names, _values, max_size=4)


@quick
@given(_documents, _documents)
def test_a_patch_makes_one_document_of_the_other(wanted: Json, given_document: Json) -> None:
    """And leaves that as it was, for others have it too."""
    before = copy.deepcopy(given_document)
    assert exact(patched(given_document, difference(wanted, given_document))) == exact(wanted)
    assert exact(given_document) == exact(before)
    assert difference(wanted, copy.deepcopy(wanted)) == []


def test_a_text_that_is_there_is_copied() -> None:
    """A patch does not say it again, and a change of the one leaves the other."""
    patch = difference({"a": None, "b": "long text"}, {"a": "long text"})
    assert patch == [{"op": "copy", "from": "/a", "path": "/b"}, {"op": "replace", "path": "/a", "value": None}]


@pytest.mark.parametrize(
    "step",
    [
        {"op": "move", "from": "/a", "path": "/b"},
        {"op": "remove", "path": "/b"},
        {"op": "add", "path": "/b/c", "value": 1},
        {"op": "add", "path": "/a/c", "value": 1},
        {"op": "replace", "path": "/l/5", "value": 1},
        {"op": "replace", "path": "/l/x", "value": 1},
        {"op": "copy", "from": "/x", "path": "/b"},
        {"op": "replace", "path": ""},
        {"path": "/a"},
        "remove",
        None,
    ],
    ids=str,
)
def test_a_patch_of_another_document_is_refused(step: Any) -> None:
    """Whoever wrote it."""
    with pytest.raises(ValueError, match=r"patch|operation|invalid|Patch"):
        patched({"a": 1, "l": [1]}, [step])
