"""Offloads full KV blocks to the prefix store, and holds them until they have been copied."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from backend.engine.block_pool import BlockPool
from backend.engine.kv_blocks import KvBlocks
from backend.engine.kv_connector import KvConnector, SaveRequest, StoredPrefix
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.sequence import Sequence

_HELD_SHARE = 4
"""At most a quarter of all blocks is held for copying."""
_MAX_ENDED = 256
_CHECKED_PER_STEP = 8
"""So many ended sequences are checked between two steps."""


@dataclass(slots=True, eq=False)
class _SequenceBlocks:
    """The blocks of a sequence that the pool can find."""

    prefix: StoredPrefix
    tokens: list[int]
    exact_keys: list[bytes]
    keys: list[bytes]
    """Keys in the pool; they differ from the exact keys after a block that was restored with a loss."""

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def lossy_from(self) -> int:
        """First block that is not what the model computes; the number of blocks where all are."""
        pairs = zip(self.keys, self.exact_keys, strict=True)
        return next((place for place, (key, exact) in enumerate(pairs) if key != exact), self.blocks)


class KvOffloader:
    """Used by the engine's thread.

    A sequence's blocks are offloaded in order. Blocks that do not fit when the sequence ends stay in the pool and are
    offloaded later, unless they have been evicted by then.
    """

    def __init__(self, pool: BlockPool, kv_blocks: KvBlocks, kv_connector: KvConnector) -> None:
        self.holders: Counter[int] = Counter()
        """Blocks that are being copied."""
        self._pool = pool
        self._kv_blocks = kv_blocks
        self._kv_connector = kv_connector
        self._ended: deque[_SequenceBlocks] = deque(maxlen=_MAX_ENDED)
        self._in_flight: set[SaveRequest] = set()
        self._is_refused = False
        """There was no staging memory for a copy, and none has become free since."""

    @property
    def has_room(self) -> bool:
        """Whether blocks can be offloaded now."""
        return self._room > 0 and not self._is_refused

    def offer(self, sequence: Sequence, keys: list[bytes]) -> None:
        """Offloads the blocks that a sequence has filled, as far as there is room.

        Args:
            keys: of its blocks in the pool.
        """
        prefix = sequence.prefix
        if prefix is not None and prefix.kept < len(keys):
            self._offload(_grown(sequence, prefix, keys), sequence.blocks[: len(keys)])

    def sequence_ended(self, sequence: Sequence, keys: list[bytes]) -> None:
        """The same for a sequence that ends: blocks that do not fit now are offloaded later."""
        self.offer(sequence, keys)
        if sequence.prefix is not None and sequence.prefix.kept < len(keys):
            self._ended.append(_grown(sequence, sequence.prefix, keys))

    def kept(self, keep: SaveRequest) -> None:
        """Releases blocks that have been copied, and offloads what ended sequences left."""
        keep.outgoing.close()
        self._in_flight.discard(keep)
        self._is_refused = False
        self.holders -= Counter(keep.blocks)
        self._pool.release(keep.blocks)
        for _ in range(min(_CHECKED_PER_STEP, len(self._ended))):
            if not self.has_room:
                return
            grown = self._ended[0]
            found = self._pool.match(grown.keys, grown.tokens, BLOCK_SIZE).blocks
            self._offload(grown, found)
            if grown.prefix.kept >= len(found):  # the rest, if any, has been evicted
                self._ended.popleft()

    def cancel(self, first_key: bytes | None) -> None:
        """Cancels the offload of chains that begin with this block; None: of all chains."""
        chains = [grown for grown in self._ended if first_key in (None, grown.exact_keys[0])]
        for grown in chains:
            self._ended.remove(grown)
        for keep in self._in_flight:
            blocks = keep.prefix.chain.blocks
            if first_key is None or (blocks and blocks[0].key == first_key):
                keep.cancel.set()

    @property
    def _room(self) -> int:
        return max(0, self._pool.num_blocks // _HELD_SHARE - self.holders.total())

    def _offload(self, grown: _SequenceBlocks, blocks: list[int]) -> None:
        """Offloads some of a sequence's blocks; ``blocks`` are its first ones."""
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
            self._pool.acquire(block)
        self.holders.update(given)
        grown.prefix.kept = until
        tokens = grown.tokens[first * BLOCK_SIZE : until * BLOCK_SIZE]
        keys = grown.exact_keys[first:until]
        keep = SaveRequest(grown.prefix, first, tokens, keys, given, outgoing, until <= lossy_from)
        self._in_flight.add(keep)
        self._kv_connector.keep(keep)


def _grown(sequence: Sequence, prefix: StoredPrefix, keys: list[bytes]) -> _SequenceBlocks:
    return _SequenceBlocks(prefix, sequence.tokens[: len(keys) * BLOCK_SIZE], sequence.block_keys[: len(keys)], keys)
