"""Gives full blocks to those who keep them elsewhere, and holds them until they have been copied."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from backend.engine.block_pool import BlockPool
from backend.engine.kv_blocks import KvBlocks
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.prefix_io import Keep, PrefixIO, StoredPrefix
from backend.engine.sequence import Sequence

_MOST_HELD = 4
"""At most this part of all blocks, the fourth, is held for those who copy them."""
_MOST_LEFT = 256
_LOOKS = 8
"""So many of them are looked at between two steps."""


@dataclass(slots=True, eq=False)
class _Grown:
    """A sequence as far as its blocks can be found."""

    prefix: StoredPrefix
    tokens: list[int]
    exact_keys: list[bytes]
    keys: list[bytes]
    """Those in the pool, which are other ones from where something was restored with a loss."""

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def lossy_from(self) -> int:
        """First block that is not what the model computes; the number of blocks where all are."""
        pairs = zip(self.keys, self.exact_keys, strict=True)
        return next((place for place, (key, exact) in enumerate(pairs) if key != exact), self.blocks)


class HandOver:
    """One thread uses it, the engine's.

    A sequence's blocks are handed over in order. What there is no room for when it ends waits in the pool, where it may
    be evicted by then, and so may what sequences that ended before it have left.
    """

    def __init__(self, pool: BlockPool, kv_blocks: KvBlocks, prefix_io: PrefixIO) -> None:
        self.holders: Counter[int] = Counter()
        """Blocks that are being copied."""
        self._pool = pool
        self._kv_blocks = kv_blocks
        self._prefix_io = prefix_io
        self._left: deque[_Grown] = deque(maxlen=_MOST_LEFT)
        self._under_way: set[Keep] = set()
        self._is_refused = False
        """There was no memory to copy through, and since then none has become free."""

    @property
    def has_room(self) -> bool:
        """Whether anything can be handed over just now."""
        return self._room > 0 and not self._is_refused

    def offer(self, sequence: Sequence, keys: list[bytes]) -> None:
        """Hands over what a sequence has filled, as far as there is room.

        Args:
            keys: of its blocks that others can find.
        """
        prefix = sequence.prefix
        if prefix is not None and prefix.kept < len(keys):
            self._give(_grown(sequence, prefix, keys), sequence.blocks[: len(keys)])

    def leave(self, sequence: Sequence, keys: list[bytes]) -> None:
        """The same for one that ends: what there is no room for now comes later."""
        self.offer(sequence, keys)
        if sequence.prefix is not None and sequence.prefix.kept < len(keys):
            self._left.append(_grown(sequence, sequence.prefix, keys))

    def kept(self, keep: Keep) -> None:
        """Takes blocks back that have been copied, and hands over what was left."""
        keep.outgoing.close()
        self._under_way.discard(keep)
        self._is_refused = False
        self.holders -= Counter(keep.blocks)
        self._pool.release(keep.blocks)
        for _ in range(min(_LOOKS, len(self._left))):
            if not self.has_room:
                return
            grown = self._left[0]
            found = self._pool.match(grown.keys, grown.tokens, BLOCK_SIZE).blocks
            self._give(grown, found)
            if grown.prefix.kept >= len(found):  # the rest, if any, has been evicted
                self._left.popleft()

    def give_up(self, first_key: bytes | None) -> None:
        """Nothing is kept any more of chains that begin with this block; None: of any that were handed over so far."""
        chains = [grown for grown in self._left if first_key in (None, grown.exact_keys[0])]
        for grown in chains:
            self._left.remove(grown)
        for keep in self._under_way:
            blocks = keep.prefix.chain.blocks
            if first_key is None or (blocks and blocks[0].key == first_key):
                keep.halt.set()

    @property
    def _room(self) -> int:
        return max(0, self._pool.num_blocks // _MOST_HELD - self.holders.total())

    def _give(self, grown: _Grown, blocks: list[int]) -> None:
        """Hands over some of a sequence's blocks, of which these are the first."""
        first, lossy_from = grown.prefix.kept, grown.lossy_from
        until = min(len(blocks), first + self._room, first + self._kv_blocks.most_at_once)
        if first < lossy_from:
            until = min(until, lossy_from)
        given = blocks[first:until]
        if not given:
            return
        outgoing = self._kv_blocks.outgoing(given)
        if outgoing is None:
            self._is_refused = True
            return
        for block in given:
            self._pool.share(block)
        self.holders.update(given)
        grown.prefix.kept = until
        tokens = grown.tokens[first * BLOCK_SIZE : until * BLOCK_SIZE]
        keys = grown.exact_keys[first:until]
        keep = Keep(grown.prefix, first, tokens, keys, given, outgoing, until <= lossy_from)
        self._under_way.add(keep)
        self._prefix_io.keep(keep)


def _grown(sequence: Sequence, prefix: StoredPrefix, keys: list[bytes]) -> _Grown:
    return _Grown(prefix, sequence.tokens[: len(keys) * BLOCK_SIZE], sequence.block_keys[: len(keys)], keys)
