"""Simple, slow caches for comparison."""

from collections.abc import Iterator, Sequence

Chain = Sequence[int]


def lru_hits(chains: Sequence[Chain], capacity: int) -> int:
    """Leading blocks found by a cache that evicts the least recently used leaf."""
    last_use: dict[int, tuple[int, int]] = {}
    hits = 0
    for turn, chain in enumerate(chains):
        for found, key in enumerate(chain):
            if key not in last_use:
                hits += found
                break
        else:
            hits += len(chain)
        # Within a chain later blocks are less recent, so the oldest of all is always a leaf.
        last_use.update({key: (turn, -place) for place, key in enumerate(chain)})
        for key in sorted(last_use, key=last_use.__getitem__)[: max(0, len(last_use) - capacity)]:
            del last_use[key]
    return hits


def most_hits(chains: Sequence[Chain], capacity: int) -> int:
    """The most leading blocks that any cache can find, by trying all its possible contents."""
    parents = {key: before for chain in chains for before, key in zip((-1, *chain), chain, strict=False)}
    best = {frozenset[int](): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for stored, hits in best.items():
            found = sum(key in stored for key in chain)
            for kept in _prefix_closed(stored | set(chain), capacity, parents):
                after[kept] = max(after.get(kept, -1), hits + found)
        best = after
    return max(best.values())


def _prefix_closed(keys: frozenset[int], capacity: int, parents: dict[int, int]) -> Iterator[frozenset[int]]:
    ordered = sorted(keys)
    for choice in range(2 ** len(ordered)):
        if choice.bit_count() <= capacity:
            kept = frozenset(key for place, key in enumerate(ordered) if choice >> place & 1)
            if all(parents[key] in kept or parents[key] == -1 for key in kept):
                yield kept
