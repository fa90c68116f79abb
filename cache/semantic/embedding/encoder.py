"""The interface of text encoders."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from cache.semantic.embedding.manifest import TOKENIZER_FILE, Manifest

Vectors = npt.NDArray[np.float32]

_MIN_NORM = 1e-12


class Encoder(Protocol):
    """A loaded sentence-embedding model. Any thread may use it at any time; no call changes later results."""

    name: str
    """Of the model and of its runtime, for display."""
    fingerprint: str
    """Of all the model's files. Vectors of different fingerprints must never be compared."""
    dimensions: int

    def length(self, text: str) -> int:
        """About how many tokens the model would read, after truncation: the cost of a text."""
        ...

    def encode(self, texts: list[str]) -> Vectors:
        """Unit vectors, float32 [len(texts), dimensions], C order; no texts give [0, dimensions].

        A text is truncated as in the model's own pipeline. The row of a text without a direction (zero, not finite) is
        NaN. The last bits of a vector may depend on the other texts.
        """
        ...


def unit(vectors: Vectors) -> Vectors:
    """Rows scaled to length 1; NaN where a row has no direction. float32 [n, d] to float32 [n, d]."""
    # A row of infinities or NaN gives NaN, without the warning.
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        scaled = vectors / np.where(norms > _MIN_NORM, norms, np.nan)
    return np.ascontiguousarray(scaled, dtype=np.float32)


def well_formed(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair: JSON can have one, UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# Enough characters per token for most texts; else the whole text is read.
_CHARACTERS_OF_TOKEN = 64


class Tokens(NamedTuple):
    """The tokens of a text."""

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
        # A megabyte takes a second to tokenize, and most of it is truncated.
        longest = self._manifest.longest
        most = len(text) if longest is None or self._manifest.cuts_left else longest * _CHARACTERS_OF_TOKEN
        encoding = self._tokenizer.encode(well_formed(text[:most]))
        # With so many tokens truncated, the last word, which may be incomplete, is not in the rest.
        if most >= len(text) or len(encoding.overflowing) > 1:
            return encoding
        return self._tokenizer.encode(well_formed(text))
