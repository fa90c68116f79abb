"""The tree of a bounded tier against a simple, slow model."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefix_store.eviction.access import Access
from prefix_store.eviction.hazard import HazardPolicy
from prefix_store.eviction.lru import LeastRecentlyUsed
from prefix_store.eviction.policy import Policy
from prefix_store.eviction.tree import BlockTree

Key = tuple[int, ...]

CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(
    lambda tokens: [tuple(tokens[: end + 1]) for end in range(len(tokens))]
)


class Model(RuleBasedStateMachine):
    """What is stored, by key: size and turn of the last use. A key's parent is the key without its last token."""

    def policy(self) -> Policy:
        raise NotImplementedError

    def check_victim(self, key: Key, may_go: list[Key]) -> None:
        """Called for each victim with all possible victims."""

    @initialize(capacity=st.integers(1, 14), remembered=st.sampled_from([0.0, 1.0, 8.0]))
    def begin(self, capacity: int, remembered: float) -> None:
        self.tree: BlockTree[Key] = BlockTree(capacity, self.policy(), remembered)
        self.sizes: dict[Key, int] = {}
        self.turns: dict[Key, int] = {}
        self.pins: Counter[Key] = Counter()
        self.seen: set[Key] = set()
        self.now, self.turn = 0.0, 0
        self.open: list[Access] = []

    @rule(keys=CHAINS, size=st.integers(1, 3), one_shot=st.booleans(), later=st.sampled_from([0.0, 0.4, 30.0]))
    def use(self, keys: list[Key], size: int, one_shot: bool, later: float) -> None:
        self.now += later
        access = Access(self.now, one_shot)
        self.open.append(access)
        self._use(keys, access, size)

    @rule(keys=CHAINS, size=st.integers(1, 3), which=st.integers(0, 9))
    def use_again(self, keys: list[Key], size: int, which: int) -> None:
        """A request offers blocks late, after other requests."""
        if self.open:
            self._use(keys, self.open[which % len(self.open)], size)

    def _use(self, keys: list[Key], access: Access, size: int) -> None:
        before = set(self.sizes)
        leading = self.tree.lookup(keys)
        assert leading == sum(key in before for key in keys)
        gone = self.tree.use(keys, access, size)
        self.turn += 1
        stored = set(self.tree)
        admitted = {key for key in keys if key in stored or key in gone}
        if access.one_shot:
            assert admitted - before <= self.seen
        else:
            assert admitted == set(keys)
        self.seen.update(keys)
        for key in admitted:
            self.sizes.setdefault(key, size)
        for key in before.intersection(keys) | admitted:
            self.turns[key] = self.turn
        for key in gone:
            assert sum(self.sizes.values()) > self.tree.capacity, "it did not have to go"
            parents = {stored[:-1] for stored in self.sizes}
            may_go = [stored for stored in self.sizes if stored not in parents and not self.pins[stored]]
            assert key in may_go
            self.check_victim(key, may_go)
            del self.sizes[key]
        assert set(self.sizes) == stored

    @rule(output_length=st.integers(0, 1_000), which=st.integers(0, 9))
    def end(self, output_length: int, which: int) -> None:
        if self.open:
            self.open.pop(which % len(self.open)).end(output_length)

    @rule(keys=CHAINS)
    def pin(self, keys: list[Key]) -> None:
        if keys[-1] in self.sizes:
            self.tree.pin(keys[-1])
            self.pins[keys[-1]] += 1

    @rule(which=st.integers(0, 9))
    def unpin(self, which: int) -> None:
        pinned = sorted(self.pins.elements())
        if pinned:
            key = pinned[which % len(pinned)]
            self.tree.unpin(key)
            self.pins[key] -= 1

    @rule(keys=CHAINS)
    def remove(self, keys: list[Key]) -> None:
        key = keys[-1]
        lost = {stored for stored in self.sizes if stored[: len(key)] == key}
        gone = self.tree.remove(key)
        assert set(gone) == lost
        assert len(gone) == len(lost)
        for stored in lost:
            del self.sizes[stored], self.pins[stored]

    @invariant()
    def books_are_right(self) -> None:
        assert self.tree.problems() == []
        assert self.tree.size == sum(self.sizes.values()) <= self.tree.capacity
        assert all(len(key) == 1 or key[:-1] in self.sizes for key in self.sizes), "a chain has a hole"
        assert all(self.sizes.get(key) for key in self.pins.elements()), "a pinned block has gone"


class LruModel(Model):
    def policy(self) -> Policy:
        return LeastRecentlyUsed()

    def check_victim(self, key: Key, may_go: list[Key]) -> None:
        assert self.turns[key] == min(self.turns[other] for other in may_go)


class HazardModel(Model):
    def policy(self) -> Policy:
        return HazardPolicy(seed=1)


EFFORT = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLeastRecentlyUsed = LruModel.TestCase
TestLeastRecentlyUsed.settings = EFFORT
TestHazardIndex = HazardModel.TestCase
TestHazardIndex.settings = EFFORT
