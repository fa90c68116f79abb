"""What an entry remembers of its request, and in what another request differs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.entries.key import canonical_body, request_key
from cache.index.fingerprint import (
    Difference,
    decode_fingerprint,
    differences,
    encode_fingerprint,
    fingerprint,
)

SECRET = "my name is Ada Lovelace"
ASKED: dict[str, Any] = {
    "model": "gpt",
    "temperature": 0.5,
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SECRET}],
}


def differing(**fields: Any) -> list[Difference]:
    return differences(fingerprint({**ASKED, **fields}), fingerprint(ASKED))


def test_no_text_of_a_request_is_kept() -> None:
    """Neither of a message nor of a field that nobody knows."""
    body = {**ASKED, "my_field": SECRET, "tools": [{"name": SECRET}], "stop": [SECRET], SECRET[:8]: 1}
    kept = encode_fingerprint(fingerprint(body))
    assert SECRET.encode() not in kept
    assert b"Be brief" not in kept


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, Difference("temperature", "changed", 0, 0.5)),
        ({"temperature": 0.5, "top_p": 0.1}, Difference("top_p", "added", here=0.1)),
        ({"model": "llama"}, Difference("model", "changed", "llama", "gpt")),
        ({"my_field": "a text"}, Difference("my_field", "added")),
        ({"logprobs": True}, Difference("logprobs", "added", here=True)),
        ({"response_format": {"type": "json_object"}}, Difference("response_format", "added", here="json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, Difference("response_format", "added")),
    ],
)
def test_a_field_that_differs_is_named(fields: dict[str, Any], expected: Difference) -> None:
    """With its values where they say nothing of a person."""
    assert differing(**fields) == [expected]


def test_a_missing_field_is_named() -> None:
    """It is removed here."""
    here = {name: value for name, value in ASKED.items() if name != "temperature"}
    assert differences(fingerprint(here), fingerprint(ASKED)) == [Difference("temperature", "removed", there=0.5)]


def test_true_is_not_one() -> None:
    """As for the key."""
    assert differences(fingerprint({"n": True}), fingerprint({"n": 2})) == [Difference("n", "changed", True, 2)]
    assert differences(fingerprint({"x": True}), fingerprint({"x": 1})) == [Difference("x", "changed", True, 1)]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_messages_that_differ_are_placed() -> None:
    """A changed one by its place; more or less of them where they begin to differ."""
    system, user = ASKED["messages"]
    assert differing(messages=[message("system", "Be long."), user]) == [
        Difference("messages[0]", "changed", "system", "system")
    ]
    assert differing(messages=[system, message("user", "a"), message("assistant", "b"), user]) == [
        Difference("messages[1]", "added", here="user"),
        Difference("messages[2]", "added", here="assistant"),
    ]
    assert differing(messages=[user]) == [Difference("messages[0]", "removed", there="system")]


json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
bodies = st.dictionaries(
    st.sampled_from(["model", "temperature", "n", "tools", "stop", "user", "stream", "x", "messages"]), json, max_size=6
)


@given(bodies, bodies)
def test_requests_differ_where_their_keys_do(one: dict[str, Any], other: dict[str, Any]) -> None:
    """No difference is found between requests with one key, and some between others; and encoding loses nothing."""
    here, there = fingerprint(canonical_body(one)), fingerprint(canonical_body(other))
    same = request_key("a", "f", one) == request_key("a", "f", other)
    assert (differences(here, there) == []) == same
    assert decode_fingerprint(encode_fingerprint(here)) == here


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"not messagepack"])
def test_other_bytes_are_no_fingerprint(data: bytes) -> None:
    """Entries of an earlier version have none."""
    assert decode_fingerprint(data) is None
