"""Vectors to test with: clustered as those of texts are, and their true neighbours."""

import numpy as np

from cache.semantic.index.table import Floats


def units(vectors: Floats) -> Floats:
    """float32 [n, d], each row divided by its length."""
    normalised: Floats = (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)
    return normalised


def topics(count: int, dimensions: int, seed: int, about: int = 200) -> Floats:
    """`count` unit vectors around `about` random directions, at cosines of about .8, float32 [count, dimensions]."""
    random = np.random.default_rng(0)
    centres = units(random.standard_normal((about, dimensions), np.float32))
    random = np.random.default_rng(seed)
    noise = units(random.standard_normal((count, dimensions), np.float32))
    return units(centres[random.integers(0, about, count)] + np.float32(0.75) * noise)


def unit(seed: int, dimensions: int = 8) -> Floats:
    return units(np.random.default_rng(seed).standard_normal(dimensions, np.float32))
