"""Simulated caches: the tree of a tier, whose blocks have one size and no bytes."""

from dataclasses import dataclass
from typing import Protocol

from prefix_store.eviction.access import Access
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import REMEMBERED_TURNOVERS, BlockTree
from prefix_store.replay.trace import TraceRequest


@dataclass(slots=True)
class Hits:
    """Counts of a replay. A hit is a leading block of a prompt that is stored with its ancestors."""

    block_tokens: int
    blocks: int = 0
    hit_blocks: int = 0
    tokens: int = 0
    hit_tokens: int = 0

    def count(self, request: TraceRequest, leading: int) -> None:
        """Counts a request of which `leading` blocks were stored."""
        self.blocks += len(request.keys)
        self.hit_blocks += leading
        self.tokens += request.input_length
        self.hit_tokens += min(leading * self.block_tokens, request.input_length)

    @property
    def ratios(self) -> dict[str, float]:
        """Shares of all blocks and of all prompt tokens; 0 where there are none."""
        return {
            "block_hit_ratio": self.hit_blocks / self.blocks if self.blocks else 0.0,
            "token_hit_ratio": self.hit_tokens / self.tokens if self.tokens else 0.0,
        }


class Cache(Protocol):
    """A simulated cache."""

    hits: Hits

    def see(self, request: TraceRequest, access: Access) -> None:
        """Counts the hits of a request, then uses it."""


class SingleCache:
    """One tier. All blocks of a request enter when it arrives; answers take no time."""

    def __init__(
        self, capacity: int, policy: Policy, block_tokens: int, remembered: float = REMEMBERED_TURNOVERS
    ) -> None:
        self.tree: BlockTree[int] = BlockTree(capacity, policy, remembered)
        self.hits = Hits(block_tokens)

    def see(self, request: TraceRequest, access: Access) -> None:
        self.hits.count(request, self.tree.lookup(request.keys))
        self.tree.use(request.keys, access)


class RoundRobin:
    """Engines with private caches that divide the capacity; requests go to each in turn."""

    def __init__(self, capacity: int, engines: int, block_tokens: int) -> None:
        self._trees = _private_trees(capacity, engines)
        self._next = 0
        self.hits = Hits(block_tokens)

    def see(self, request: TraceRequest, access: Access) -> None:
        tree = self._trees[self._next]
        self._next = (self._next + 1) % len(self._trees)
        self.hits.count(request, tree.lookup(request.keys))
        tree.use(request.keys, access)


class PrefixAware:
    """The same engines; a request goes to the one that has the longest prefix of its prompt.

    If that is at most a tenth of it, such as a shared system prompt, the request goes to the engine with the least
    recent work: a trace has no service times, so the weight of work halves every 64 requests.
    """

    _MIN_SHARE = 0.1
    _FADE = 0.5 ** (1 / 64)

    def __init__(self, capacity: int, engines: int, block_tokens: int) -> None:
        self._trees = _private_trees(capacity, engines)
        self._given = [0.0] * engines
        self.hits = Hits(block_tokens)

    def see(self, request: TraceRequest, access: Access) -> None:
        leads = [tree.lookup(request.keys) for tree in self._trees]
        engine = leads.index(max(leads))
        if leads[engine] <= self._MIN_SHARE * len(request.keys):
            engine = self._given.index(min(self._given))
        self._given = [self._FADE * given for given in self._given]
        self._given[engine] += len(request.keys) - leads[engine]
        self.hits.count(request, leads[engine])
        self._trees[engine].use(request.keys, access)


def _private_trees(capacity: int, engines: int) -> list[BlockTree[int]]:
    """A tree per engine, with LRU eviction and without remembered blocks."""
    return [BlockTree(max(1, capacity // engines), LeastRecentlyUsed(), remembered=0.0) for _ in range(engines)]
