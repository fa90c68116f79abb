"""Hit ratios of other capacities, from a sample of the keys.

Spatially hashed sampling (SHARDS: Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15): blocks are
sampled by the hash of their key, and a cache with a share of the blocks and the same share of the capacity has about
the same hit ratio. The sampled blocks of a chain are a chain, so the sample runs the code of the real tier.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

import numpy as np

from prefix_store.eviction.access import Access
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree

K = TypeVar("K", bound=bytes | int)

_RANGE = 1 << 32
# 2**64 over the golden ratio: it spreads consecutive numbers.
_FIBONACCI_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


class GhostCaches(Generic[K]):
    """Simulated caches of several capacities; keys are hashes of 16 bytes, or non-negative numbers.

    A cache of n blocks costs a tree of `rate` · n blocks. With a few thousand sampled blocks the ratios are accurate to
    about one point; below a few hundred they are unreliable. A difference between the sampled uses and the expected
    share is attributed to the few blocks that all requests use, hence to hits (the paper's SHARDS-adj).
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
        """Counts each cache's hits of a request's whole chain, then uses it. Once for each request."""
        sample = self._sample(keys)
        self._blocks += len(keys)
        self._sampled += len(sample)
        for capacity, tree in self._trees.items():
            self._hits[capacity] += tree.lookup(sample)
            tree.use(sample, access, size)

    def ratios(self) -> dict[int, float]:
        """Block hit ratio by capacity, the smallest capacity first; 0 before the first use."""
        expected = self.rate * self._blocks
        missed = expected - self._sampled
        return {
            capacity: min(1.0, max(0.0, (hits + missed) / expected)) if self._blocks else 0.0
            for capacity, hits in self._hits.items()
        }

    def _sample(self, keys: Sequence[K]) -> list[K]:
        """The keys whose hash is below this share of the hash range; the same in every process."""
        if not keys:
            return []
        if isinstance(keys[0], bytes):
            hashes = np.frombuffer(b"".join(cast(Sequence[bytes], keys)), dtype=">u4")
            places = hashes.reshape(len(keys), -1)[:, 0]
        else:
            places = np.array(keys, dtype=np.uint64) * _FIBONACCI_MULTIPLIER >> _HALF
        return [keys[place] for place in np.flatnonzero(places < self._below).tolist()]
