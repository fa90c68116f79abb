"""The pool loses no block, hands none out twice, frees what no sequence holds, and never confuses contents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backend.engine.block_pool import BlockPool, Match
from prefix_store.identity.keys import KeyChain

SIZE = 2
TOKENS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE)
SALTS = st.sampled_from(["", "tenant"])


def keys_of(tokens: list[int], salt: str, weak: bool = False) -> list[bytes]:
    """The keys of the full blocks; weak keys have four different values, so they collide often."""
    keys: list[bytes] = []
    chain = KeyChain(salt.ljust(16).encode(), SIZE)
    for start in range(0, len(tokens) - SIZE + 1, SIZE):
        key = chain.next_key(keys[-1] if keys else chain.root, tokens[start : start + SIZE])
        keys.append(bytes([key[0] % 4]) if weak else key)
    return keys


class Holder:
    """A sequence as the pool sees it."""

    def __init__(self, tokens: list[int], salt: str, blocks: list[int], computed: int) -> None:
        self.tokens = tokens
        self.salt = salt
        self.blocks = blocks
        self.computed = computed
        self.out_of_window = False


class Pool(RuleBasedStateMachine):
    """Sequences come, compute, share and go in any order; ``written`` is what the blocks really contain."""

    weak_keys = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.holders: list[Holder] = []
        self.written: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.waiting: list[tuple[list[int], str, Match]] = []

    def keys(self, tokens: list[int], salt: str) -> list[bytes]:
        return keys_of(tokens, salt, self.weak_keys)

    @rule(tokens=TOKENS, salt=SALTS)
    def join(self, tokens: list[int], salt: str) -> None:
        """Shares the blocks that are found, which must have the sequence's first tokens, and allocates the rest."""
        if self.weak_keys:
            salt = ""  # tenants are kept apart by keys alone
        shared = self.pool.match(self.keys(tokens, salt), tokens, SIZE).blocks
        for index, block in enumerate(shared):
            assert self.written[block] == (salt, tuple(tokens[: (index + 1) * SIZE]))
        for block in shared:
            self.pool.acquire(block)
        free = self.pool.num_free
        own = self.pool.allocate(-(-len(tokens) // SIZE) - len(shared))
        assert (own is None) == (-(-len(tokens) // SIZE) - len(shared) > free)
        if own is None:
            self.pool.release(shared)
            return
        held = {block for holder in self.holders for block in holder.blocks} | set(shared)
        assert not held & set(own)
        for block in own:
            self.written.pop(block, None)
        self.holders.append(Holder(tokens, salt, shared + own, len(shared)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Computes a sequence's next full block and offers it."""
        holder = data.draw(st.sampled_from(self.holders))
        index = holder.computed
        if (index + 1) * SIZE > len(holder.tokens) or holder.out_of_window:
            return
        content = (holder.salt, tuple(holder.tokens[: (index + 1) * SIZE]))
        self.written[holder.blocks[index]] = content
        key = self.keys(holder.tokens, holder.salt)[index]
        parent = holder.blocks[index - 1] if index else None
        tokens = holder.tokens[index * SIZE : (index + 1) * SIZE]
        block = self.pool.register(holder.blocks[index], key, parent, tokens)
        if block is not None:
            assert self.written[block] == content
            holder.blocks[index] = block
            holder.computed += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder.blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave_behind(self, data: st.DataObject) -> None:
        """A sequence gives its first blocks back and keeps the others, as windows do."""
        holder = data.draw(st.sampled_from(self.holders))
        past = data.draw(st.integers(0, len(holder.blocks)))
        self.pool.release(holder.blocks[:past])
        holder.blocks, holder.out_of_window = holder.blocks[past:], True

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        """After `forget`, the blocks that a sequence holds can no longer be found."""
        holder = data.draw(st.sampled_from(self.holders))
        self.pool.forget(holder.blocks)
        keys = self.keys(holder.tokens, holder.salt)
        found = self.pool.match(keys, holder.tokens, SIZE).blocks
        assert not set(found) & set(holder.blocks)

    @rule(tokens=TOKENS, salt=SALTS)
    def wait(self, tokens: list[int], salt: str) -> None:
        """A prompt is matched now and will be matched again later."""
        self.waiting.append((tokens, salt, self.pool.match(self.keys(tokens, salt), tokens, SIZE)))

    @invariant()
    def what_was_found_before_is_only_a_short_cut(self) -> None:
        for tokens, salt, before in self.waiting:
            anew = self.pool.match(self.keys(tokens, salt), tokens, SIZE)
            assert self.pool.match(self.keys(tokens, salt), tokens, SIZE, before) == anew

    @invariant()
    def the_books_are_right(self) -> None:
        holders = Counter(block for holder in self.holders for block in holder.blocks)
        assert self.pool.problems(holders) == []
        assert self.pool.num_held == len(holders)
        assert self.pool.num_free + self.pool.num_held == self.pool.num_blocks
        assert self.pool.num_cached <= self.pool.num_free

    def teardown(self) -> None:
        for holder in self.holders:
            self.pool.release(holder.blocks)
        assert self.pool.num_free == self.pool.num_blocks


class PoolWithCollisions(Pool):
    """The same with keys that collide: matches are shorter, and never wrong."""

    weak_keys = True


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolWithCollisions = PoolWithCollisions.TestCase
TestPoolWithCollisions.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def chain(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of a sequence that has computed all its tokens."""
    blocks = pool.allocate(len(tokens) // SIZE)
    assert blocks is not None
    for index, key in enumerate(keys_of(tokens, "")):
        parent = blocks[index - 1] if index else None
        got = pool.register(blocks[index], key, parent, tokens[index * SIZE : (index + 1) * SIZE])
        assert got is not None
        blocks[index] = got
    return blocks


def test_the_least_recently_used_end_of_a_chain_goes_first() -> None:
    """Eviction takes the least recently used chain first, and the end of a chain before its beginning."""
    pool = BlockPool(4)
    old, new = chain(pool, [1, 2, 3, 4]), chain(pool, [5, 6, 7, 8])
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached) == (4, 4)
    assert [pool.allocate(1) for _ in range(4)] == [[old[1]], [old[0]], [new[1]], [new[0]]]
    assert pool.num_cached == 0


def test_blank_blocks_are_used_before_cached_ones() -> None:
    """Allocation takes blank blocks first and evicts a cached block only when no blank one is left."""
    pool = BlockPool(3)
    blocks = chain(pool, [1, 2])
    pool.release(blocks)
    taken = pool.allocate(2)
    assert taken is not None
    assert blocks[0] not in taken
    assert pool.match(keys_of([1, 2], ""), [1, 2], SIZE).blocks == blocks
    assert pool.allocate(1) == blocks
    assert pool.match(keys_of([1, 2], ""), [1, 2], SIZE).blocks == []


def test_equal_blocks_become_one() -> None:
    """Two sequences that computed the same content in one step share one block afterwards."""
    pool = BlockPool(4)
    first, second = chain(pool, [1, 2, 3, 4]), chain(pool, [1, 2, 9, 9])
    assert second[0] == first[0]
    assert pool.ref_count(first[0]) == 2
    assert pool.num_free == 1


def test_a_match_compares_tokens_and_parent_not_the_key_alone() -> None:
    """A block matches only if its tokens and its parent match too, so an equal key alone finds nothing."""
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    assert blocks is not None
    one, after_one, two, after_two = blocks
    assert pool.register(one, b"one", None, [1, 2]) == one
    assert pool.register(after_one, b"same", one, [9, 9]) == after_one
    assert pool.register(two, b"two", None, [3, 4]) == two
    assert pool.match([b"one", b"same"], [1, 2, 9, 9], SIZE).blocks == [one, after_one]
    assert pool.match([b"two", b"same"], [3, 4, 9, 9], SIZE).blocks == [two]
    assert pool.match([b"one", b"same"], [1, 2, 9, 8], SIZE).blocks == [one]
    assert pool.register(after_two, b"same", two, [9, 9]) is None


def test_a_match_continues_an_earlier_match_or_cuts_it() -> None:
    """A match from an earlier match is extended or cut to the given keys, and leaves the earlier match as it is."""
    pool = BlockPool(4)
    tokens = [1, 2, 3, 4]
    keys = keys_of(tokens, "")
    chain(pool, tokens[:2])
    before = pool.match(keys, tokens, SIZE)
    blocks = chain(pool, tokens)
    after = pool.match(keys, tokens, SIZE, before)
    assert (before.blocks, after.blocks) == (blocks[:1], blocks)
    assert pool.match(keys[:1], tokens, SIZE, after) == before


def test_salts_separate() -> None:
    """The same tokens under another salt are another prefix."""
    pool = BlockPool(2)
    chain(pool, [1, 2])
    assert keys_of([1, 2], "") != keys_of([1, 2], "tenant")
    assert pool.match(keys_of([1, 2], "tenant"), [1, 2], SIZE).blocks == []


def test_the_integrity_check_reports_wrong_reference_counts() -> None:
    """The integrity check reports each lost and each surplus reference with the number of its block."""
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    assert blocks == [0, 1]
    assert pool.problems(Counter([0, 1])) == []
    assert pool.problems(Counter([0])) == ["block 1 counts 1 references, sequences hold it 0 times"]
    assert len(pool.problems(Counter([0, 1, 2, 1]))) == 2


# No use of the pool's public methods leads to these states, so they are written into its private fields.
def free_a_block_twice(pool: BlockPool, held: list[int]) -> None:
    pool._empty.append(pool._empty[0])


def free_a_held_block(pool: BlockPool, held: list[int]) -> None:
    pool._empty.append(held[0])


def give_a_blank_block_a_content(pool: BlockPool, held: list[int]) -> None:
    pool._contents[pool._empty[0]] = pool._contents[held[0]]


def take_a_cached_blocks_content(pool: BlockPool, held: list[int]) -> None:
    pool.release(held)
    pool._contents[held[1]] = None


def add_a_key_without_a_content(pool: BlockPool, held: list[int]) -> None:
    pool._by_key[b"strange"] = 0


def take_a_parents_content(pool: BlockPool, held: list[int]) -> None:
    pool._contents[held[0]] = None


@pytest.mark.parametrize(
    ("fault", "sentences"),
    [
        (lambda pool, held: None, set()),
        (free_a_block_twice, {"a block is free twice"}),
        (free_a_held_block, {"block 0 is both held and free, or neither", "block 0 is blank and has a content"}),
        (
            give_a_blank_block_a_content,
            {
                "block 2 is blank and has a content",
                "block 2 is not found by its key",
                "there are more keys than contents",
            },
        ),
        (
            take_a_cached_blocks_content,
            {"block 1 is cached without a content", "there are more keys than contents"},
        ),
        (add_a_key_without_a_content, {"there are more keys than contents"}),
        (
            take_a_parents_content,
            {"block 1 follows block 0, which has no content", "there are more keys than contents"},
        ),
    ],
    ids=[
        "no fault",
        "free twice",
        "held and free",
        "blank with a content",
        "cached without a content",
        "key without a content",
        "parent without a content",
    ],
)
def test_the_integrity_check_reports_each_fault(
    fault: Callable[[BlockPool, list[int]], None], sentences: set[str]
) -> None:
    """The integrity check has a sentence for each fault in the pool's state, and none for a sound pool."""
    pool = BlockPool(4)
    held = chain(pool, [1, 2, 3, 4])
    fault(pool, held)
    counts = Counter({block: pool.ref_count(block) for block in range(4)})
    assert set(pool.problems(counts)) == sentences


def test_misuse_is_an_error() -> None:
    """The pool raises ValueError when a free block is released or shared, and when it is made with no block."""
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="already free"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.acquire(1)
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
