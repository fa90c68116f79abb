"""Which upstream was sent which beginnings of prompts: the router's own memory of what they will hold."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence


class PrefixHistory:
    """The blocks of prompts that upstreams were sent, `capacity` of each at most.

    Models the eviction of an upstream's own cache: the least recently used block goes first, of a prompt its last one.
    It may remember more than the upstream holds: that costs hits, where it remembers less it costs more.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        """How many blocks are remembered, of all upstreams."""
        return sum(map(len, self._held.values()))

    def sent(self, upstream: str, blocks: Sequence[int]) -> None:
        """The upstream was sent a prompt of these blocks."""
        held = self._held.setdefault(upstream, OrderedDict())
        # The last block becomes the oldest of this prompt, so that it is the first to be evicted.
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        _shrink(held, self._capacity)

    def shares(self, upstreams: Iterable[str], blocks: Sequence[int]) -> Mapping[str, float]:
        """The leading share of a prompt, from 0 to 1, that each upstream was sent before."""
        return {name: self._leading(name, blocks) / len(blocks) for name in upstreams} if blocks else {}

    def resize(self, capacity: int) -> None:
        """Changes how many blocks of each upstream are remembered."""
        self._capacity = capacity
        for held in self._held.values():
            _shrink(held, capacity)

    def keep_only(self, upstreams: Iterable[str]) -> None:
        """Forgets all other upstreams."""
        kept = set(upstreams)
        for name in [name for name in self._held if name not in kept]:
            del self._held[name]

    def forget(self, upstream: str) -> None:
        """The upstream has lost its cache."""
        self._held.pop(upstream, None)

    def _leading(self, upstream: str, blocks: Sequence[int]) -> int:
        held = self._held.get(upstream)
        if not held:
            return 0
        return next((number for number, block in enumerate(blocks) if block not in held), len(blocks))


def _shrink(held: OrderedDict[int, None], capacity: int) -> None:
    while len(held) > capacity:
        held.popitem(last=False)
