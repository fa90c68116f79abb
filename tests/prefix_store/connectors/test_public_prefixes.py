"""Prefixes that an operator publishes, with a stand-in for vLLM's tokenizer."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefix_store.connectors.public_prefixes import publish
from prefix_store.identity.keys import Published

BLOCK = 4


class Tokenizer:
    """A token for each letter; a conversation is its messages and tools, one after the other."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **named: Any) -> list[int]:
        assert named == {"add_generation_prompt": False, "tokenize": True, "return_dict": False}
        return self.encode(repr(tools) + "".join(message["content"] for message in messages))


@pytest.fixture(autouse=True)
def _tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(cached_tokenizer_from_config=lambda config: Tokenizer())
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(tokenizers=module))
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)


def published(tmp_path: Path, *texts: str) -> Published:
    """What files with these texts publish."""
    files = [tmp_path / str(number) for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    prefixes = Published(bytes(16), BLOCK)
    publish([str(file) for file in files], None, prefixes)
    return prefixes


def test_a_text_and_a_conversation_are_published(tmp_path: Path) -> None:
    """Their full blocks, as the engine makes tokens of them."""
    given = published(tmp_path, "You are kind.", ' {"messages": [{"role": "system", "content": "Be brief."}]}')
    expected = Published(bytes(16), BLOCK)
    expected.publish([ord(letter) for letter in "You are kind."])
    expected.publish([ord(letter) for letter in "NoneBe brief."])
    assert given.keys == expected.keys
    assert len(given.keys) == 6


def test_tools_are_part_of_a_conversation(tmp_path: Path) -> None:
    """With other tools it begins with other tokens."""
    text = '{"messages": [{"role": "system", "content": "Be brief."}], "tools": [{"name": "search"}]}'
    assert len(published(tmp_path, text).keys) > 3


def test_nothing_is_loaded_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without files there is no tokenizer, which takes seconds."""
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", None)
    publish([], None, Published(bytes(16), BLOCK))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("abc", "3 tokens fill no block; expected at least 4"),
        ('{"messages": 1}', "Expected `array`"),
        ('{"messages": [', "truncated"),
    ],
)
def test_a_file_that_publishes_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """The message names it."""
    with pytest.raises(ValueError, match=f"public_prefix {tmp_path / '0'}: .*{message}"):
        published(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Also one that is no text."""
    (tmp_path / "bytes").write_bytes(b"\xff\xff")
    for name in ("absent", "bytes"):
        with pytest.raises(ValueError, match=f"public_prefix .*{name}"):
            publish([str(tmp_path / name)], None, Published(bytes(16), BLOCK))
