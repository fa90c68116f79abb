"""Any order of calls gives what a plain dictionary and a full comparison give."""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cache.semantic.index.index import VectorIndex
from cache.semantic.index.partition import Thresholds
from tests.cache.semantic.index.vectors import topics

VECTORS = topics(64, 6, seed=3, about=64)
# Everything is scanned, so that lists miss nothing and the comparison is exact.
TINY = Thresholds(flat=6, scan=100_000, batch=2)

entries = st.integers(0, 40).map(str)
numbers = st.integers(0, len(VECTORS) - 1)
partitions = st.sampled_from(["a", "a", "a", "b"])
spans = st.sampled_from([0.0, 0.5, 1.0, 3.25, 1e6])


class IndexMachine(RuleBasedStateMachine):
    """`entries` of the model: id -> (partition, number of the vector, when it expires)."""

    @initialize()
    def begin(self) -> None:
        self.index = VectorIndex(6, TINY)
        self.entries: dict[str, tuple[str, int, float]] = {}
        self.now = 1_700_000_000.0

    @rule(partition=partitions, entry=entries, number=numbers, span=spans)
    def add(self, partition: str, entry: str, number: int, span: float) -> None:
        self._add(partition, entry, number, span)

    @rule(partition=partitions, first=st.integers(0, 40), count=st.integers(1, 30), span=spans)
    def add_many(self, partition: str, first: int, count: int, span: float) -> None:
        for number in range(first, first + count):
            self._add(partition, str(number), number % len(VECTORS), span)

    @rule(entry=entries)
    def remove(self, entry: str) -> None:
        assert self.index.remove(entry) == (self.entries.pop(entry, None) is not None)

    @rule(first=st.integers(0, 40), count=st.integers(1, 40))
    def remove_many(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.remove(str(number))

    @rule(span=spans)
    def let_time_pass(self, span: float) -> None:
        self.now += span

    @rule()
    def expire(self) -> None:
        for entry in [entry for entry, (_, _, expires) in self.entries.items() if expires <= self.now]:
            assert self.index.remove(entry)
            del self.entries[entry]

    @rule()
    def settle(self) -> None:
        assert self.index.settle(30)

    @rule(partition=partitions, number=numbers, k=st.sampled_from([1, 3, 16, 100]))
    def search(self, partition: str, number: int, k: int) -> None:
        found = self.index.search(partition, VECTORS[number], k, self.now)
        living = {
            entry: float(VECTORS[place] @ VECTORS[number])
            for entry, (where, place, expires) in self.entries.items()
            if where == partition and expires > self.now
        }
        nearest = sorted(living.values(), reverse=True)[:k]
        cosines = [cosine for _, cosine in found]
        assert cosines == sorted(cosines, reverse=True)
        assert len({entry for entry, _ in found}) == len(found)
        np.testing.assert_allclose(cosines, nearest, atol=2e-4)
        np.testing.assert_allclose(cosines, [living[entry] for entry, _ in found], atol=1e-4)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.index) == len(self.entries)
        assert self.index.partitions == len({where for where, _, _ in self.entries.values()})

    def teardown(self) -> None:
        self.index.close()

    def _add(self, partition: str, entry: str, number: int, span: float) -> None:
        self.index.add(partition, entry, VECTORS[number], self.now + span)
        self.entries[entry] = (partition, number, self.now + span)


IndexMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestIndex = IndexMachine.TestCase
