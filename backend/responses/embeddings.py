"""Responses of ``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    """The numbers, or the base64 of their little-endian float32 bytes."""
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


def embedding_list(
    means: Sequence[npt.NDArray[np.float32]], model: str, prompt_tokens: int, as_base64: bool
) -> EmbeddingList:
    """The whole response.

    Args:
        means: float32 [hidden_size] for each input: the mean of its last hidden states.
        prompt_tokens: of all inputs together.
    """
    data = [Embedding(index, _encoded(_unit(mean), as_base64)) for index, mean in enumerate(means)]
    return EmbeddingList(data, model, EmbeddingUsage(prompt_tokens, prompt_tokens))


def _unit(mean: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Scales to L2 norm 1, so that the dot product of two is their cosine similarity."""
    wide = mean.astype(np.float64)
    length = np.linalg.norm(wide)
    return (wide / length if length > 0 else wide).astype("<f4")


def _encoded(vector: npt.NDArray[np.float32], as_base64: bool) -> list[float] | str:
    return base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
