"""The operator's credential and names of models, which an upstream gets in place of the client's."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.settings.fields import SettingsError
from gateway.settings.upstreams import UpstreamSettings
from gateway.upstreams.identity import api_key, cache_salt, with_cache_salt, with_own_model

KEY = "sk-of-the-operator"
NAMES = {"chat": "org/Qwen3-8B"}


def upstream(place: str) -> UpstreamSettings:
    return UpstreamSettings(url="http://gpu/v1", name="gpu", api_key=place)


def test_a_credential_comes_from_the_environment_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """White space around it does not count, and its text is masked in every output."""
    monkeypatch.setenv("GPU_KEY", f" {KEY}\n")
    (tmp_path / "key").write_text(f"{KEY}\n")
    for place in ("env:GPU_KEY", f"file:{tmp_path}/key"):
        found = api_key(upstream(place))
        assert found == KEY
        assert KEY not in repr(found)
    assert api_key(UpstreamSettings(url="http://gpu/v1")) is None


def test_a_credential_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file may begin with ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "key").write_text(KEY)
    assert api_key(upstream("file:~/key")) == KEY


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read the file .*: No such file"),
        (b"", "which is empty"),
        (b" \n", "which is empty"),
        (b"\xff\xfe", "it is no text"),
        ("schlüssel".encode(), "printable ASCII"),
        (b"a\r\nX-Evil: 1", "printable ASCII"),
    ],
)
def test_a_credential_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """The error names the upstream and the file, and never what the file holds."""
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=f"upstreams: gpu: api_key: .*{reason}") as raised:
        api_key(upstream(f"file:{file}"))
    assert "Evil" not in str(raised.value)


def test_a_credential_that_is_not_in_the_environment_is_named() -> None:
    """The error names the variable."""
    with pytest.raises(SettingsError, match="environment variable NO_SUCH_KEY, which is not set"):
        api_key(upstream("env:NO_SUCH_KEY"))


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b'{"model":"chat"}', b'{"model":"org/Qwen3-8B"}'),
        (
            b'{ "a" : 1.50 ,\n "model"\t:  "chat" , "b": 1e2 }',
            b'{ "a" : 1.50 ,\n "model"\t:  "org/Qwen3-8B" , "b": 1e2 }',
        ),
        (b'{"messages":[{"model":"chat"}],"model":"chat"}', b'{"messages":[{"model":"chat"}],"model":"org/Qwen3-8B"}'),
        (b'{"x":"model","model":"chat"}', b'{"x":"model","model":"org/Qwen3-8B"}'),
        (b'{"x":"\\"model\\":\\"chat\\"","model":"chat"}', b'{"x":"\\"model\\":\\"chat\\"","model":"org/Qwen3-8B"}'),
        (b'{"x":"{[","model":"chat"}', b'{"x":"{[","model":"org/Qwen3-8B"}'),
        # What cannot be replaced in its place: the other values stay as they are.
        (b'{"m\\u006fdel": "chat", "n": [1e400, 1.10]}', b'{"model":"org/Qwen3-8B","n":[1e400, 1.10]}'),
        (b'{"model":"other","model":"chat"}', b'{"model":"org/Qwen3-8B"}'),
        (b'{"m\\u006fdel": "chat"}', b'{"model":"org/Qwen3-8B"}'),
        (b'{"model": "ch\\u0061t"}', b'{"model": "org/Qwen3-8B"}'),
        # These are not its to change.
        (b'{"model":"other"}', b'{"model":"other"}'),
        (b'{"model":null}', b'{"model":null}'),
        (b'{"model":["chat"]}', b'{"model":["chat"]}'),
        (b'["model","chat"]', b'["model","chat"]'),
        (b'{"x":"\\ud800","model":"chat"}', b'{"x":"\\ud800","model":"chat"}'),  # no valid text, so no valid JSON
        (b"chat", b"chat"),
        (b"\xff", b"\xff"),
        (b"[" * 100_000, b"[" * 100_000),
    ],
)
def test_only_the_name_of_the_model_changes(body: bytes, sent: bytes) -> None:
    """Every other byte of a body stays as the client has written it."""
    assert with_own_model(body, NAMES) == sent


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["model", '"model":"chat"', "}", "\\"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.just("model"), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(before=st.dictionaries(st.text(max_size=5), JSON, max_size=4), after=st.dictionaries(st.text(max_size=5), JSON))
def test_any_body_says_the_same_with_another_model(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Decoded, a body differs in its model alone; and what precedes and follows the name is the same bytes."""
    for fields in (before, after):
        fields.pop("model", None)
    fields = {**{name: value for name, value in before.items() if name not in after}, "model": "chat", **after}
    body = msgspec.json.encode(fields)
    sent = with_own_model(body, NAMES)
    assert msgspec.json.decode(sent) == {**fields, "model": "org/Qwen3-8B"}
    assert len(sent) - len(body) == len("org/Qwen3-8B") - len("chat")


@given(
    st.sampled_from(["public", "a", "b"]),
    st.text(max_size=4),
    st.sampled_from(["public", "a", "b"]),
    st.text(max_size=4),
)
def test_tenants_never_have_the_same_salt(one: str, own: str, other: str, others: str) -> None:
    """Whatever they send; a client's own salt parts blocks within its tenant, and no tenant without one has none."""
    salts = cache_salt(one, own), cache_salt(other, others)
    assert (salts[0] == salts[1]) == ((one, own) == (other, others))
    assert (salts[0] is None) == ((one, own) == ("public", ""))


def test_a_salt_is_the_same_in_every_process() -> None:
    """Blocks of before a restart, and those that another gateway has asked for, are found again."""
    assert cache_salt("9d5b0a3c1f", "mine") == "c3da2903ef8a1fe9a735f330278f1666"


@pytest.mark.parametrize(
    ("body", "own"),
    [
        (b'{"prompt": "x", "n": [1e400, 1.10]}', None),
        (b'{"cache_salt": "mine", "prompt": "x"}', "mine"),
        (b'{"cache_\\u0073alt": "mi\\u006ee"}', "mine"),
        (b'{"cache_salt": "other", "cache_salt": "mine"}', "mine"),
        (b'{"cache_salt": null}', None),
        (b'{"cache_salt": ""}', None),
        # As Python reads it, and so vLLM.
        (b'{"cache_salt": "\\ud800"}', "\ud800"),
        (b'{"x": NaN, "cache_salt": "mine"}', "mine"),
        ('{"cache_salt": "mine"}'.encode("utf-16"), "mine"),
    ],
)
def test_a_body_has_the_salt_of_its_tenant(body: bytes, own: str | None) -> None:
    """In place of the client's, which is part of it."""
    sent = json.loads(with_cache_salt(body, "red"))
    assert sent == {**json.loads(body), "cache_salt": cache_salt("red", own)} or "NaN" in str(body)
    assert sent["cache_salt"] == cache_salt("red", own)


@pytest.mark.parametrize("body", [b'{"cache_salt": 5}', b'["cache_salt"]', b"--form", b"\xff", b'{"prompt": "x"}'])
def test_what_needs_no_salt_stays_as_it_is(body: bytes) -> None:
    """What is no object, a request without a tenant, and a salt that vLLM refuses."""
    namespace = "public" if b"prompt" in body else "red"
    assert with_cache_salt(body, namespace) == body
