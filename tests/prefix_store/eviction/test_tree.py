"""The tree of a bounded tier, in cases small enough to work out by hand."""

import time

import pytest

from prefix_store.eviction.access import Access
from prefix_store.eviction.hazard import HazardPolicy
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree


def tree_of(capacity: int, remembered: float = 8.0) -> BlockTree[str]:
    return BlockTree(capacity, LeastRecentlyUsed(), remembered)


def test_the_tail_of_the_chain_that_was_used_least_recently_goes_first() -> None:
    """Blocks are evicted from the end of the oldest chain, shared ones last."""
    tree = tree_of(5)
    assert tree.use(["system", "a1", "a2"], Access(1.0)) == []
    assert tree.use(["system", "b1", "b2"], Access(2.0)) == []
    assert tree.use(["c1"], Access(3.0)) == ["a2"]
    assert tree.use(["c1", "c2", "c3"], Access(4.0)) == ["a1", "b2"]
    assert tree.lookup(["system", "b1", "b2"]) == 2
    assert tree.lookup(["system", "a1", "a2"]) == 1
    assert set(tree) == {"system", "b1", "c1", "c2", "c3"}
    assert tree.problems() == []


def test_uses_at_one_time_are_ordered_as_they_came() -> None:
    """Requests with equal times are ordered by their arrival."""
    tree = tree_of(3)
    for key in "abc":
        tree.use([key], Access(0.0))
    tree.use(["a"], Access(0.0))
    assert tree.use(["d"], Access(0.0)) == ["b"]


def test_lead_changes_nothing() -> None:
    """A look-up is no use: it does not change the order of eviction."""
    tree = tree_of(2)
    tree.use(["a"], Access(1.0))
    tree.use(["b"], Access(2.0))
    assert tree.lookup(["a"]) == 1
    assert tree.use(["c"], Access(3.0)) == ["a"]


def test_a_request_larger_than_everything_keeps_its_beginning() -> None:
    """The blocks that do not fit are returned at once, and are not stored."""
    tree = tree_of(3)
    tree.use(["a"], Access(1.0))
    assert tree.use(list("vwxyz"), Access(2.0)) == ["a", "z", "y"]
    assert list(tree) == list("vwx")


def test_a_pinned_block_and_those_before_it_stay() -> None:
    """A pin keeps a chain up to its block until every pin is removed."""
    tree = tree_of(4)
    tree.use(["a1", "a2", "a3"], Access(1.0))
    tree.pin("a2")
    tree.pin("a2")
    assert tree.use(["b1", "b2"], Access(2.0)) == ["a3"]
    assert tree.use(["c1", "c2"], Access(3.0)) == ["b2", "b1"]
    tree.unpin("a2")
    assert tree.use(["d1", "d2", "d3"], Access(4.0)) == ["c2", "c1", "d3"]
    tree.unpin("a2")
    assert tree.use(["e1", "e2", "e3"], Access(5.0)) == ["a2", "a1", "d2"]
    with pytest.raises(KeyError):
        tree.unpin("a2")
    with pytest.raises(KeyError):
        tree.pin("a2")


def test_what_is_removed_takes_along_what_follows() -> None:
    """Removing a block removes its descendants, pinned or not; all are unknown afterwards."""
    tree = tree_of(9)
    tree.use(["a1", "a2", "a3"], Access(1.0))
    tree.use(["a1", "a2", "b3", "b4"], Access(2.0))
    tree.pin("b3")
    gone = tree.remove("a2")
    assert sorted(gone) == ["a2", "a3", "b3", "b4"]
    assert gone.index("b4") < gone.index("b3") < gone.index("a2")
    assert list(tree) == ["a1"]
    assert tree.known == 1
    assert tree.remove("a2") == []
    assert tree.problems() == []


def test_a_one_shot_is_stored_when_it_is_used_again() -> None:
    """The first use of a one-shot's new blocks stores nothing, the second one does; an access counts once."""
    tree = tree_of(4)
    tree.use(["system"], Access(1.0))
    first = Access(2.0, one_shot=True)
    assert tree.use(["system", "x", "y"], first) == []
    tree.use(["system", "x", "y", "z"], first)
    assert set(tree) == {"system"}
    tree.use(["system", "x", "w"], Access(3.0, one_shot=True))
    assert set(tree) == {"system", "x"}


def test_a_one_shot_is_forgotten_after_the_remembered_turnovers() -> None:
    """Blocks that were seen once are forgotten."""
    tree = tree_of(2, remembered=2.0)
    tree.use(["x"], Access(0.0, one_shot=True))
    for number in range(5):
        tree.use([f"other{number}"], Access(1.0))
    tree.use(["x"], Access(2.0, one_shot=True))
    assert "x" not in tree


def test_what_goes_long_after_its_last_use_is_not_remembered() -> None:
    """A chain that was kept over many turnovers is unknown after its eviction."""
    tree = tree_of(3, remembered=2.0)
    tree.use(["a1", "a2"], Access(0.0))
    tree.pin("a2")
    for number in range(9):
        tree.use([f"other{number}"], Access(1.0))
    tree.unpin("a2")
    assert tree.use(["b1", "b2"], Access(2.0)) == ["a2", "a1"]
    assert tree.runs(["a1"]) == []


def test_what_is_remembered_is_bounded() -> None:
    """For any number of chains at most nine capacities of blocks are known."""
    tree: BlockTree[int] = BlockTree(100, LeastRecentlyUsed())
    for number in range(2_000):
        tree.use([100_000 * (number % 700) + block for block in range(7)], Access(float(number)))
        assert tree.known <= 907
    assert len(tree) == 100
    assert tree.problems() == []


def test_blocks_may_differ_in_size() -> None:
    """The capacity is in bytes: a large block evicts several small ones."""
    tree = tree_of(10)
    tree.use(["a1", "a2", "a3"], Access(1.0), size=2)
    assert tree.use(["b1"], Access(2.0), size=7) == ["a3", "a2"]
    assert tree.use(["a1", "a2"], Access(3.0), size=3) == ["b1"]
    assert tree.size == 5
    assert tree.problems() == []


def test_a_chain_may_be_offered_block_by_block() -> None:
    """All offers of one request count as one use."""
    tree = tree_of(10)
    access = Access(1.0)
    for end in range(1, 5):
        tree.use(["a", "b", "c", "d"][:end], access)
    tree.use(["a", "b", "c", "d"], Access(2.0))
    assert [run.uses for run in tree.runs(["a", "b", "c", "d"])] == [2]


@pytest.mark.parametrize("keys", [["a", "a"], ["b", "a"], ["x", "b", "a"]])
def test_keys_that_are_no_chain_are_refused(keys: list[str]) -> None:
    """A key in two places raises ValueError; the tree stays consistent."""
    tree = tree_of(9)
    tree.use(["a", "b"], Access(1.0))
    with pytest.raises(ValueError, match="chain"):
        tree.use(keys, Access(2.0))
    assert tree.problems() == []


@pytest.mark.parametrize(("capacity", "remembered"), [(0, 8.0), (1, -1.0)])
def test_impossible_bounds_are_refused(capacity: int, remembered: float) -> None:
    """A capacity of 0 or a negative `remembered` raises ValueError."""
    with pytest.raises(ValueError, match="expected at least"):
        BlockTree[str](capacity, LeastRecentlyUsed(), remembered)


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, HazardPolicy])
def test_long_chains_are_used_at_two_million_blocks_a_second(policy: type[Policy]) -> None:
    """A use costs as much as a chain has branches, not blocks."""
    tree: BlockTree[bytes] = BlockTree(40_000, policy())
    chains = [[f"{chain}:{block}".encode() for block in range(2_000)] for chain in range(16)]
    began = time.process_time()
    for turn in range(1_000):
        tree.use(chains[turn % 16], Access(float(turn), output_length=100))
    assert 2_000_000 / (time.process_time() - began) > 2_000_000
    assert tree.problems() == []
