"""Blocks are never lost, never handed out twice, and free exactly when nobody holds them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.block_pool import BlockPool

OPERATIONS = st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 6)), max_size=60)


@given(num_blocks=st.integers(1, 12), operations=OPERATIONS)
def test_counts_and_free_blocks_always_add_up(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    """After any sequence of operations a block is free or held, and as often held as it was given."""
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for operation, number in operations:
        if operation == "allocate":
            free = pool.num_free
            blocks = pool.allocate(number)
            assert (blocks is None) == (number > free)
            assert not set(blocks or []) & set(held)
            held += blocks or []
        elif held:
            block = held[number % len(held)]
            if operation == "share":
                pool.share(block)
                held.append(block)
            else:
                held.remove(block)
                pool.release([block])
        assert pool.num_free == num_blocks - len(set(held))
        assert all(pool.references(block) == held.count(block) for block in range(num_blocks))


def test_misuse_is_an_error() -> None:
    """A free block can be neither released nor shared, and a pool has at least one block."""
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="already free"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share(1)
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
