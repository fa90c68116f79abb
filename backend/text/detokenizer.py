"""From token ids to text, one token at a time.

A token of a byte-level or byte-fallback vocabulary is a string of bytes, and a character may be split over several
tokens. So every token is turned into its bytes once, when the model is loaded, and a sequence runs them through an
incremental UTF-8 decoder: constant work for a token, incomplete characters wait, invalid ones become U+FFFD exactly
as in decoding the whole (both follow the Unicode standard's "maximal subpart" practice).
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from backend.errors import ModelError
from backend.models.json_fields import MAX_TOKENS

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "▁"


class TokenBytes:
    """Bytes of every token id.

    Special tokens have none: they shape the conversation and are not part of an answer's text.

    Args:
        tokenizer_json: text of a ``tokenizer.json``.
        vocab_size: rows of the model's embedding; ids beyond the tokenizer's vocabulary are empty.

    Raises:
        ModelError: the file's decoder is neither byte-level nor byte-fallback, or an id is no vocabulary's.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        values: dict[str, Any] = json.loads(tokenizer_json)
        model, added = values["model"], values.get("added_tokens") or []
        if not isinstance(model.get("vocab"), dict):
            raise ModelError(f"tokenizer.json: model type {model.get('type')!r} is not supported, expected 'BPE'")
        kinds = _decoder_kinds(values.get("decoder"))
        if "ByteLevel" in kinds:
            self.strips_first_space = False
            table = _byte_level_bytes(model["vocab"])
        elif "ByteFallback" in kinds:
            self.strips_first_space = "Strip" in kinds
            table = _byte_fallback_bytes(model["vocab"])
        else:
            raise ModelError(
                f"tokenizer.json: decoder {sorted(kinds)} is not supported, expected ByteLevel or ByteFallback"
            )
        if (last := max(table, default=0)) >= MAX_TOKENS:
            raise ModelError(f"tokenizer.json: vocab has a token of id {last}, expected ids below {MAX_TOKENS}")
        self._bytes: list[bytes] = [b""] * max(vocab_size, last + 1)
        for token_id, content in table.items():
            self._bytes[token_id] = content
        self._special: dict[int, str] = {}
        for token in added:
            if token["id"] >= len(self._bytes):
                continue
            self._bytes[token["id"]] = b"" if token["special"] else token["content"].encode()
            if token["special"]:
                self._special[token["id"]] = token["content"]

    @property
    def special_ids(self) -> dict[str, int]:
        """Ids of the special tokens by their text."""
        return {text: token_id for token_id, text in self._special.items()}

    def __getitem__(self, token_id: int) -> bytes:
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def shown(self, token_id: int) -> bytes:
        """Bytes to show for a token in log-probabilities, where special tokens are visible."""
        special = self._special.get(token_id)
        return self[token_id] if special is None else special.encode()

    def longest(self) -> int:
        """Bytes of the longest token: a text of n bytes is at least n / longest tokens."""
        specials = (len(text.encode()) for text in self._special.values())
        return max(1, max(map(len, self._bytes)), *specials)


class Detokenizer:
    """Text of one sequence's answer, token by token."""

    def __init__(
        self, token_bytes: TokenBytes, continues_text: bool = False, visible: frozenset[int] = frozenset()
    ) -> None:
        """``continues_text``: the answer follows text of its own kind, so a first space is kept.

        ``visible``: special tokens that are part of the text all the same, such as the marker of a tool call.
        """
        self._bytes = token_bytes
        self._visible = visible
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = token_bytes.strips_first_space and not continues_text

    def add(self, token_id: int) -> str:
        """Text that this token completes: often one word, sometimes nothing yet."""
        content = self._bytes.shown(token_id) if token_id in self._visible else self._bytes[token_id]
        if self._strip_space and content:
            content = content.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(content)

    def finish(self) -> str:
        """Text for bytes that still wait for the rest of their character: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some tokens at once, then nothing more."""
        return "".join(map(self.add, token_ids)) + self.finish()


def _decoder_kinds(decoder: Any) -> set[str]:
    """The library reads a list of an object's values in the place of the object, which no file of a model's has."""
    if not isinstance(decoder, Mapping):
        return set()
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return {part["type"] for part in parts if isinstance(part, Mapping)}


def _byte_level_bytes(vocab: Mapping[str, int]) -> dict[int, bytes]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    table = {}
    for token, token_id in vocab.items():
        try:
            table[token_id] = bytes(alphabet[character] for character in token)
        except KeyError:  # an added token in plain text
            table[token_id] = token.encode()
    return table


def _byte_fallback_bytes(vocab: Mapping[str, int]) -> dict[int, bytes]:
    table = {}
    for token, token_id in vocab.items():
        byte = _BYTE_TOKEN.fullmatch(token)
        text = token.replace(_SENTENCEPIECE_SPACE, " ")
        table[token_id] = bytes([int(byte[1], 16)]) if byte else text.encode()
    return table
