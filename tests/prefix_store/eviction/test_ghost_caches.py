"""Hit ratios of other sizes, from a sample."""

import random

import pytest
import xxhash

from prefix_store.eviction.access import Access
from prefix_store.eviction.ghost_caches import GhostCaches
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.tree import BlockTree


def conversations() -> list[list[int]]:
    """Turns of growing conversations, with a shared system prompt, as block numbers."""
    draw = random.Random(5)  # noqa: S311  # not a secret
    lengths: dict[int, int] = {}
    turns = []
    for _ in range(6_000):
        chat = draw.randrange(max(1, len(lengths) - 60), len(lengths) + 2)
        lengths[chat] = lengths.get(chat, 10) + draw.randrange(1, 8)
        turns.append([*range(10), *(1_000 * (chat + 1) + block for block in range(10, lengths[chat]))])
    return turns


@pytest.mark.parametrize("as_hashes", [False, True])
def test_a_sample_tells_what_other_capacities_hit(as_hashes: bool) -> None:
    """With an eighth of the blocks the ratios of three capacities are accurate to four points."""
    turns = conversations()
    capacities = (2_000, 4_000, 8_000)
    exact = {}
    for capacity in capacities:
        tree: BlockTree[int] = BlockTree(capacity, LeastRecentlyUsed())
        hits = 0
        for number, keys in enumerate(turns):
            hits += tree.lookup(keys)
            tree.use(keys, Access(float(number)))
        exact[capacity] = hits / sum(map(len, turns))
    assert exact[8_000] > exact[2_000] + 0.1
    if as_hashes:
        hashed = GhostCaches[bytes](capacities, 1 / 8, LeastRecentlyUsed)
        for number, keys in enumerate(turns):
            hashed.use([xxhash.xxh3_128_digest(key.to_bytes(8)) for key in keys], Access(float(number)))
        found = hashed.ratios()
    else:
        ghosts = GhostCaches[int](capacities, 1 / 8, LeastRecentlyUsed)
        for number, keys in enumerate(turns):
            ghosts.use(keys, Access(float(number)))
        found = ghosts.ratios()
    assert found == pytest.approx(exact, abs=0.04)


def test_nothing_seen_is_no_fault() -> None:
    """Before the first block the ratios are zero."""
    assert GhostCaches[int]([5, 10], 0.5, LeastRecentlyUsed).ratios() == {5: 0.0, 10: 0.0}


@pytest.mark.parametrize("rate", [0.0, 1.5])
def test_an_impossible_rate_is_refused(rate: float) -> None:
    """A rate is above 0 and at most 1."""
    with pytest.raises(ValueError, match="rate"):
        GhostCaches[int]([5], rate, LeastRecentlyUsed)
