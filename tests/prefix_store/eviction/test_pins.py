"""Pinned chains: which blocks stay, and how many at most."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.pins import Pins
from prefix_store.eviction.tree import BlockTree

Key = tuple[int, ...]

CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(
    lambda tokens: [tuple(tokens[: end + 1]) for end in range(len(tokens))]
)
STEPS = st.lists(st.tuples(st.sampled_from(["use", "pin", "unpin", "remove"]), CHAINS), max_size=40)


@given(steps=STEPS)
def test_what_is_pinned_stays_and_is_at_most_so_much(steps: list[tuple[str, list[Key]]]) -> None:
    """Pinned blocks stay for any operations, in a tree of ten blocks of which five may be pinned."""
    tree: BlockTree[Key] = BlockTree(20, LeastRecentlyUsed())
    pins = Pins(tree, 10)
    ends: set[Key] = set()
    for kind, keys in steps:
        kept = {end[:length] for end in ends for length in range(1, len(end) + 1)}
        match kind:
            case "use":
                assert kept.isdisjoint(tree.use(keys, Access(0.0), size=2))
            case "pin":
                count = pins.pin(keys[: tree.lookup(keys)], size=2)
                ends |= {keys[count - 1]} if count else set()
                new = len(set(keys[:count]) - kept)
                assert count == tree.lookup(keys) or (2 * len(kept) + 2 * new == 10) or (not new and len(kept) == 5)
            case "unpin":
                lengths = [len(end) for end in ends if end in keys]
                assert pins.unpin(keys) == max(lengths, default=0)
                ends -= set(keys)
            case _:
                gone = tree.remove(keys[-1])
                pins.forget(gone)
                ends -= set(gone)
        kept = {end[:length] for end in ends for length in range(1, len(end) + 1)}
        assert pins.ends == ends
        assert pins.size == 2 * len(kept) <= 10
        assert kept <= set(tree)
        assert tree.problems() == []


def test_only_what_is_stored_can_be_pinned() -> None:
    """A pin of a missing block raises KeyError."""
    tree: BlockTree[Key] = BlockTree(10, LeastRecentlyUsed())
    with pytest.raises(KeyError):
        Pins(tree, 5).pin([(1,)])
