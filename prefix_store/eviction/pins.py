"""Chains that stay in a tree, within bounds."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Generic

from prefix_store.eviction.run import K
from prefix_store.eviction.tree import BlockTree


class Pins(Generic[K]):
    """Keeps the beginnings of chains in a tree until they are unpinned, at most `most` of its capacity in all.

    A pin at a block keeps all that it follows, too. There is one at a block or there is none: pins do not count.
    """

    def __init__(self, tree: BlockTree[K], most: int) -> None:
        self.size = 0
        """What is kept, in the unit of the tree's capacity."""
        self._tree = tree
        self._most = most
        # By the block of each pin: the chain that ends with it, and the size of its blocks.
        self._chains: dict[K, tuple[tuple[K, ...], int]] = {}
        # How many of these chains each block is in.
        self._counts: Counter[K] = Counter()

    @property
    def ends(self) -> Set[K]:
        """The blocks that have a pin."""
        return self._chains.keys()

    def pin(self, keys: Sequence[K], size: int = 1) -> int:
        """Keeps a stored chain, or as much of its beginning as may be kept; returns how many blocks.

        Raises KeyError if it is not stored.
        """
        kept = next((place for place, key in enumerate(keys) if key not in self._counts), len(keys))
        count = min(len(keys), kept + max(0, self._most - self.size) // size)
        if count and keys[count - 1] not in self._chains:
            self._tree.pin(keys[count - 1])
            chain = tuple(keys[:count])
            self._chains[chain[-1]] = chain, size
            self._counts.update(chain)
            self.size += (count - min(kept, count)) * size
        return count

    def unpin(self, keys: Iterable[K]) -> int:
        """Takes back the pins at any of these blocks; returns how many blocks the longest chain of them had."""
        return max((self._unpin(key) for key in keys if key in self._chains), default=0)

    def forget(self, gone: Iterable[K]) -> None:
        """Blocks have been removed from the tree, and the pins at them with them."""
        for key in gone:
            if key in self._chains:
                self._take_back(key)

    def _unpin(self, end: K) -> int:
        self._tree.unpin(end)
        return self._take_back(end)

    def _take_back(self, end: K) -> int:
        chain, size = self._chains.pop(end)
        self._counts.subtract(chain)
        for key in reversed(chain):
            if self._counts[key]:
                break  # what is kept of a chain is a beginning of it
            del self._counts[key]
            self.size -= size
        return len(chain)
