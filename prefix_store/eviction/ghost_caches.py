"""What other capacities would have hit, from a sample of the keys.

Spatially hashed sampling (SHARDS: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15): blocks are
in the sample by the hash of their key, and a cache that has a share of the blocks and the same share of the capacity
hits about as often as the whole one. What is sampled of a chain is a chain, so the miniature runs the code of the real
tier.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

import numpy as np

from prefix_store.eviction.access import Access
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree

K = TypeVar("K", bound=bytes | int)

_RANGE = 1 << 32
# 2**64 over the golden ratio: numbers that follow each other land far apart.
_SCATTER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


class GhostCaches(Generic[K]):
    """Caches without bytes at several capacities; keys are hashes of 16 bytes, or numbers that are not negative.

    A cache of n blocks costs what the books of `rate` · n blocks cost. With a few thousand blocks in the sample the
    ratios are right to about a point; below some hundred they say little. Where the sample saw fewer uses than its
    share, or more, the difference is taken to be of the few blocks that all use, hence hits (the paper's SHARDS-adj).
    """

    def __init__(self, capacities: Sequence[int], rate: float, policy: Callable[[], Policy]) -> None:
        """`policy` makes one for each cache. Raises ValueError for a rate that is not above 0 and at most 1."""
        if not 0 < rate <= 1:
            raise ValueError(f"rate is {rate}, expected above 0 and at most 1")
        self.rate = rate
        self._below = round(rate * _RANGE)
        self._trees: dict[int, BlockTree[K]] = {
            capacity: BlockTree(max(1, round(rate * capacity)), policy()) for capacity in sorted(set(capacities))
        }
        self._hits = dict.fromkeys(self._trees, 0)
        self._blocks = 0
        self._sampled = 0

    def use(self, keys: Sequence[K], access: Access, size: int = 1) -> None:
        """Count what each cache has of a request's whole chain, then use it there. Once for each request."""
        sample = self._sample(keys)
        self._blocks += len(keys)
        self._sampled += len(sample)
        for capacity, tree in self._trees.items():
            self._hits[capacity] += tree.lookup(sample)
            tree.use(sample, access, size)

    def ratios(self) -> dict[int, float]:
        """The share of the blocks that each capacity would have had, smallest first; 0 before anything was sampled."""
        expected = self.rate * self._blocks
        missed = expected - self._sampled
        return {
            capacity: min(1.0, max(0.0, (hits + missed) / expected)) if self._blocks else 0.0
            for capacity, hits in self._hits.items()
        }

    def _sample(self, keys: Sequence[K]) -> list[K]:
        """The keys whose place in the range of all hashes is below the rate, the same ones in every process."""
        if not keys:
            return []
        if isinstance(keys[0], bytes):
            hashes = np.frombuffer(b"".join(cast(Sequence[bytes], keys)), dtype=">u4")
            places = hashes.reshape(len(keys), -1)[:, 0]
        else:
            places = np.array(keys, dtype=np.uint64) * _SCATTER >> _HALF
        return [keys[place] for place in np.flatnonzero(places < self._below).tolist()]
