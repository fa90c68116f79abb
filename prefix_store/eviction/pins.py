"""Pinned chains of a tree, up to a limit."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Generic

from prefix_store.eviction.run import K
from prefix_store.eviction.tree import BlockTree


class Pins(Generic[K]):
    """Pins leading blocks of chains in a tree; together they have at most `most` of its capacity.

    A pin of a block also keeps its ancestors. A block has at most one pin: pins are not counted.
    """

    def __init__(self, tree: BlockTree[K], most: int) -> None:
        self.size = 0
        """Of all pinned blocks, in the capacity's unit."""
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
        """Pins a stored chain, or its leading blocks up to the limit; returns how many blocks.

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
        """Removes the pins of any of these blocks; returns the number of blocks of the longest chain."""
        return max((self._unpin(key) for key in keys if key in self._chains), default=0)

    def forget(self, gone: Iterable[K]) -> None:
        """Forgets the pins of blocks that were removed from the tree."""
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
                break  # another pin keeps this block and its ancestors
            del self._counts[key]
            self.size -= size
        return len(chain)
