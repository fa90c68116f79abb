"""What the embedding and the guards say of pairs."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.evaluation.cross_validation import Similarities
from cache.semantic.evaluation.pairs import LabelledPair
from cache.semantic.wording.comparison import compare
from cache.semantic.wording.text import Text

BATCH = 1024
"""Pairs that are embedded together; no more vectors than theirs are kept."""


class Verdicts(NamedTuple):
    """What is known of each pair.

    `similarities` are cosines, float32 [pairs]; 0 where a text is empty or has no vector, since nothing is ever served
    for such a one. `refusals` are the names of the guards that refuse, None where all agree. `embedding_seconds` is
    the time of all embeddings, `guard_seconds` that of reading each pair's texts and asking the guards, float64
    [pairs].
    """

    similarities: Similarities
    refusals: list[str | None]
    embedding_seconds: float
    guard_seconds: npt.NDArray[np.float64]


def verdicts_of(pairs: Sequence[LabelledPair], encoder: Encoder, progress: Callable[[int], None]) -> Verdicts:
    """Embed and read `pairs`; `progress` is told now and then how many are done."""
    similarities = np.zeros(len(pairs), dtype=np.float32)
    refusals: list[str | None] = []
    guard_seconds = np.zeros(len(pairs))
    embedding_seconds = 0.0
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        began = time.perf_counter()
        similarities[start : start + len(batch)] = _cosines(batch, encoder)
        embedding_seconds += time.perf_counter() - began
        for place, pair in enumerate(batch, start):
            began = time.perf_counter()
            refusals.append(compare(Text.of(pair.asked), [Text.of(pair.cached)]).veto or None)
            guard_seconds[place] = time.perf_counter() - began
        progress(start + len(batch))
    return Verdicts(similarities, refusals, embedding_seconds, guard_seconds)


def _cosines(pairs: Sequence[LabelledPair], encoder: Encoder) -> Similarities:
    # Each distinct text is embedded once.
    texts = list(dict.fromkeys(text for pair in pairs for text in (pair.cached, pair.asked)))
    vectors = encoder.encode(texts)
    row = {text: place for place, text in enumerate(texts)}
    cached = vectors[[row[pair.cached] for pair in pairs]]
    asked = vectors[[row[pair.asked] for pair in pairs]]
    cosines: Similarities = np.einsum("ij,ij->i", cached, asked)
    empty = [not (pair.cached.strip() and pair.asked.strip()) for pair in pairs]
    cosines[empty | np.isnan(cosines)] = 0.0
    return cosines
