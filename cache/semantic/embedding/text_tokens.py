"""Texts to token numbers, as the model's own pipeline makes them: of an exported tokenizer, without padding."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from cache.semantic.embedding.encoder import well_formed
from cache.semantic.embedding.manifest import TOKENIZER_FILE, Manifest

# No reader of a whole text needs more than this of it to fill one token, or it is read whole after all.
_CHARACTERS_OF_TOKEN = 64


class Tokens(NamedTuple):
    """A text as the transformer reads it."""

    input_ids: list[int]
    token_type_ids: list[int]


class TextTokens:
    """The tokenizer of an export."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        if manifest.longest is not None:
            self._tokenizer.enable_truncation(manifest.longest, direction="left" if manifest.cuts_left else "right")

    def read(self, text: str) -> Tokens:
        """The tokens of a text with the model's prompt before it, after the cut."""
        encoding = self._read_head(self._manifest.prompt + text)
        return Tokens(encoding.ids, encoding.type_ids)

    def _read_head(self, text: str) -> Encoding:
        # A megabyte takes a second to read, and most of it is cut away again.
        longest = self._manifest.longest
        most = len(text) if longest is None or self._manifest.cuts_left else longest * _CHARACTERS_OF_TOKEN
        encoding = self._tokenizer.encode(well_formed(text[:most]))
        # With that much cut away, the word that ended too early is not in what is left.
        if most >= len(text) or len(encoding.overflowing) > 1:
            return encoding
        return self._tokenizer.encode(well_formed(text))
