"""Which blocks of the pool a sequence holds: those it shares, those it fills, and none outside its window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from backend.engine.block_pool import BlockPool
from backend.engine.model_runner import BLOCK_SIZE
from backend.engine.sequence import Sequence


def blocks_at_most(num_tokens: int, window: int | None, step_tokens: int) -> int:
    """Blocks that a sequence that grows to so many tokens holds at any time, alone.

    Args:
        window: tokens that a token sees at most, itself included; None: all.
    """
    blocks = -(-num_tokens // BLOCK_SIZE)
    # Wherever in a block the window begins, and wherever in another the step ends.
    return blocks if window is None else min(blocks, (window + step_tokens + 2 * BLOCK_SIZE - 3) // BLOCK_SIZE)


class BlockManager:
    """Allocates blocks of a pool to sequences and releases them.

    Where every layer is windowed, a sequence holds only the blocks that some row still to come can see, and those of
    the tokens that the next step may compute. Blocks that leave the window are released at once.

    Args:
        step_tokens: tokens computed in one step at most.
        shares_prefixes: whether sequences may use blocks that others have computed.
        window: tokens that a token sees at most, itself included; None: there is a layer in which it sees all.
        lossy_key: the key that takes the place of a block's own from where something was restored with a loss; None:
            nothing ever is.
    """

    def __init__(
        self,
        pool: BlockPool,
        step_tokens: int,
        shares_prefixes: bool,
        window: int | None,
        lossy_key: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._pool = pool
        self._step_tokens = step_tokens
        self._shares_prefixes = shares_prefixes
        self._window = window
        self._lossy_key = lossy_key

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return self._pool.num_free

    def num_missing(self, sequence: Sequence) -> int:
        """Blocks that a running sequence needs for the next step beyond those it holds; less than 1: none."""
        until = self._num_blocks_until(sequence.num_tokens, sequence.num_computed)
        return until - sequence.first_block - len(sequence.blocks)

    def num_required(self, sequence: Sequence, shared: list[int]) -> int:
        """Free blocks that a sequence takes if it starts with these computed ones."""
        computed = len(shared) * BLOCK_SIZE
        revived = sum(not self._pool.ref_count(block) for block in shared[self._first_visible_block(computed) :])
        return self._num_blocks_until(sequence.num_tokens, computed) - len(shared) + revived

    def num_freed_with(self, sequences: list[Sequence]) -> int:
        """Blocks that are free once all of these sequences are released."""
        theirs = Counter(block for sequence in sequences for block in sequence.blocks)
        return sum(self._pool.ref_count(block) == count for block, count in theirs.items())

    def allocate(self, sequence: Sequence, count: int) -> bool:
        """Allocates blocks to a sequence; False, and no change, if there are not so many."""
        blocks = self._pool.allocate(count)
        sequence.blocks += blocks or []
        return blocks is not None

    def start(self, sequence: Sequence, shared: list[int]) -> None:
        """Starts a sequence with computed blocks and allocates the others.

        Raises:
            RuntimeError: there are not enough free blocks; check ``num_required`` first.
        """
        for block in shared:
            self._pool.acquire(block)
        sequence.blocks = list(shared)
        sequence.num_registered = len(shared)
        sequence.num_computed = len(shared) * BLOCK_SIZE
        self._release_out_of_window(sequence)
        if not self.allocate(sequence, self.num_missing(sequence)):
            raise RuntimeError("an admitted sequence found no blocks")

    def mark_computed(self, sequence: Sequence, count: int) -> None:
        """Marks tokens as computed, and registers the blocks that are full now."""
        sequence.num_computed += count
        if self.may_share(sequence):
            self._register(sequence)
        self._release_out_of_window(sequence)

    def release(self, sequence: Sequence) -> None:
        """Releases all blocks; nothing of the sequence counts as computed any more."""
        if sequence.fetch is not None:
            sequence.fetch.cancel.set()
            sequence.fetch = None
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.first_block = 0
        sequence.num_computed = 0
        sequence.num_registered = 0
        sequence.lossy_from = None

    def forget(self, sequence: Sequence) -> None:
        """Removes the sequence's blocks from the prefix cache: their contents are not valid."""
        keys = self._keys(sequence, sequence.first_block)
        out_of_window = self._pool.match(keys, sequence.tokens, BLOCK_SIZE)
        self._pool.forget(out_of_window.blocks + sequence.blocks)

    def match(self, sequence: Sequence) -> list[int]:
        """Computed blocks that the sequence can begin with; at least its last token is left to compute."""
        sequence.lossy_from = None  # set by an earlier match
        keys = self.matchable_keys(sequence)
        found = sequence.match = self._pool.match(keys, sequence.tokens, BLOCK_SIZE, sequence.match)
        if self._lossy_key is None or len(found.blocks) == len(keys):
            return found.blocks
        # Blocks after these may have been restored with a loss, under other keys.
        sequence.lossy_from = len(found.blocks)
        mixed = self._keys(sequence, len(keys))
        longer = self._pool.match(mixed, sequence.tokens, BLOCK_SIZE, found)
        if len(longer.blocks) == len(found.blocks):
            sequence.lossy_from = None
        return longer.blocks

    def matchable_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the blocks that a sequence could begin with if they were in the prefix cache."""
        return self._keys(sequence, (sequence.num_tokens - 1) // BLOCK_SIZE) if self.may_share(sequence) else []

    def pending_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of the full blocks of a running sequence that are not registered yet."""
        if not self.may_share(sequence):
            return []
        return self._keys(sequence, sequence.num_tokens // BLOCK_SIZE)[sequence.num_registered :]

    def registered_keys(self, sequence: Sequence) -> list[bytes]:
        """Keys of a sequence's registered blocks."""
        return self._keys(sequence, sequence.num_registered)

    def may_share(self, sequence: Sequence) -> bool:
        """Whether the sequence uses blocks of others and lets them use its own."""
        return self._shares_prefixes and sequence.can_share

    def _register(self, sequence: Sequence) -> None:
        while (sequence.num_registered + 1) * BLOCK_SIZE <= sequence.num_computed:
            index, at = sequence.num_registered, sequence.num_registered - sequence.first_block
            if at < 0 or (at == 0 and index > 0):
                return  # its parent has been released: only with windows shorter than a block
            block = self._pool.register(
                sequence.blocks[at],
                self._keys(sequence, index + 1)[index],
                sequence.blocks[at - 1] if index else None,
                sequence.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE],
            )
            if block is None:
                return
            sequence.blocks[at] = block
            sequence.num_registered += 1

    def _release_out_of_window(self, sequence: Sequence) -> None:
        """Releases the blocks outside the window of all rows to come; they stay in the prefix cache until evicted."""
        past = self._first_visible_block(sequence.num_computed) - sequence.first_block
        if past > 0:
            self._pool.release(sequence.blocks[:past])
            del sequence.blocks[:past]
            sequence.first_block += past

    def _first_visible_block(self, position: int) -> int:
        """First block that a row at this position or after it attends to."""
        return 0 if self._window is None else max(0, position + 1 - self._window) // BLOCK_SIZE

    def _num_blocks_until(self, num_tokens: int, num_computed: int) -> int:
        """Blocks, counted from the sequence's start, that it needs at this point."""
        if self._window is not None:
            # Reserved for a full window at once, so that the sequence is not preempted while the window fills.
            num_tokens = min(num_tokens, max(num_computed, self._window) + self._step_tokens)
        return -(-num_tokens // BLOCK_SIZE)

    def _keys(self, sequence: Sequence, count: int) -> list[bytes]:
        """Keys of the sequence's first ``count`` full blocks, made once."""
        exact, chain = sequence.block_keys, sequence.keys
        while len(exact) < count:
            tokens = sequence.tokens[len(exact) * BLOCK_SIZE : (len(exact) + 1) * BLOCK_SIZE]
            exact.append(chain.next_key(exact[-1] if exact else chain.root, tokens))
        first = sequence.lossy_from
        if first is None or first >= count or self._lossy_key is None:
            return exact[:count]
        lossy = sequence.lossy_keys
        lossy += map(self._lossy_key, exact[len(lossy) : count])
        return exact[:first] + lossy[first:count]
