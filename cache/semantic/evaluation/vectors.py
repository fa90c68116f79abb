"""The vectors of many texts."""

from collections.abc import Callable, Sequence

import numpy as np

from cache.semantic.embedding.encoder import Encoder, Vectors

_BATCH = 64


def vectors_of(texts: Sequence[str], encoder: Encoder, progress: Callable[[int], None] = lambda done: None) -> Vectors:
    """Their vectors, float32 [texts, dimensions], 0 for a text without a direction: it is near nothing.

    `progress` is told now and then how many there are.
    """
    # Texts of about one length go together: the short ones of a batch are computed as long as its longest.
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    vectors = np.empty((len(texts), encoder.dimensions), dtype=np.float32)
    for start in range(0, len(order), _BATCH):
        batch = order[start : start + _BATCH]
        vectors[batch] = encoder.encode([texts[place] for place in batch])
        progress(start + len(batch))
    return np.nan_to_num(vectors)
