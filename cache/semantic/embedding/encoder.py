"""The interface of text encoders, and what all of them do with texts and vectors."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]
Vector = npt.NDArray[np.float32]

_MIN_NORM = 1e-12
_BATCH = 256


class Encoder(Protocol):
    """A loaded sentence-embedding model. Any thread may use it at any time; no call changes later results."""

    name: str
    """Of the model and of its runtime, for display."""
    fingerprint: str
    """Of all the model's files. Vectors of different fingerprints must never be compared."""
    dimensions: int

    def encode(self, texts: list[str]) -> Vectors:
        """Unit vectors, float32 [len(texts), dimensions], C order; no texts give [0, dimensions].

        A text is truncated as in the model's own pipeline. The row of a text without a direction (zero, not finite) is
        NaN. The last bits of a vector may depend on the other texts.
        """


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


def vectors_of(texts: Sequence[str], encoder: Encoder, progress: Callable[[str], None] = lambda said: None) -> Vectors:
    """Their vectors, float32 [texts, dimensions], 0 for a text without a direction: it is near nothing.

    `progress` is told now and then how many of them there are.
    """
    vectors = np.empty((len(texts), encoder.dimensions), dtype=np.float32)
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        vectors[start : start + len(batch)] = encoder.encode(list(batch))
        progress(f"{start + len(batch)} of {len(texts)} texts embedded")
    return np.nan_to_num(vectors)
