"""The learned policy: evicts the blocks with the lowest expected reuse.

A block's class is its number of uses and the answer length of the request that used it last: chats and an agent's tool
calls differ in it. ReuseTable learns for each class after what time blocks are used again, from stored blocks and from
evicted ones that are remembered: else it would learn only from what the policy kept.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from prefix_store.eviction.access import Access
from prefix_store.eviction.age_histogram import AgeHistogram
from prefix_store.eviction.ages import BUCKETS, MAX_STEPS, STEPS_PER_E
from prefix_store.eviction.reuse_table import ReuseTable
from prefix_store.eviction.run import Run

_USES = (1, 2, 3, 5, 9, 20, 60)
_OUTPUT_LENGTHS = (16, 64, 256)
_KINDS = len(_OUTPUT_LENGTHS) + 2
_UNKNOWN = _KINDS - 1
_SAMPLES = 64
_ACCESSES_PER_TABLE = 40
_HALF_LIFE_TABLES = 1000.0


class HazardPolicy:
    """Evicts the tail with the lowest index among those of 64 random chains. Deterministic for a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._leaves = Leaves(seed)
        self._table = ReuseTable(len(_USES) + 1, _KINDS, _HALF_LIFE_TABLES, undecided=_UNKNOWN)
        self._waiting = AgeHistogram(self._table.classes)
        self._now = 0.0
        self._accesses = 0
        self._access: Access | None = None
        self._index = self._compute()

    def on_use(self, path: Sequence[Run[Any]], access: Access) -> None:
        # Requests may offer blocks in another order than they arrived; ages must not be negative.
        self._now = now = max(self._now, access.time)
        for run in path:
            if run.access is access:
                continue
            blocks, since = len(run.keys), run.access.time
            self._table.reuse(run.mark, now - since, blocks)
            self._waiting.remove(run.mark, since, blocks)
            run.mark = _class(run.uses + 1, access)
            self._waiting.add(run.mark, access.time, blocks)
        if access is not self._access:
            self._access = access
            self._accesses += 1
            if self._accesses % _ACCESSES_PER_TABLE == 0:
                self._index = self._compute()

    def on_insert(self, run: Run[Any], blocks: int) -> None:
        run.mark = _class(run.uses, run.access)
        self._waiting.add(run.mark, run.access.time, blocks)

    def on_access_end(self, run: Run[Any]) -> None:
        label, since, blocks = _class(run.uses, run.access), run.access.time, len(run.keys)
        self._waiting.move(run.mark, label, since, blocks)
        # Time until now counts for the old class, time from now on for the new one.
        self._table.change(run.mark, label, self._now - since, blocks)
        run.mark = label

    def on_forget(self, run: Run[Any], blocks: int) -> None:
        since = run.access.time
        self._waiting.remove(run.mark, since, blocks)
        self._table.lose(run.mark, self._now - since, blocks)

    def add(self, run: Run[Any]) -> None:
        self._leaves.add(run)

    def discard(self, run: Run[Any]) -> None:
        self._leaves.discard(run)

    def victim(self) -> Run[Any] | None:
        # The hot path of a full cache: `bucket` is inlined, and padded rows replace its upper bound.
        index, now, log = self._index, self._now, math.log
        lowest, found = 0.0, None
        for run in self._leaves.sample(_SAMPLES):
            age = now - run.access.time
            value = index[run.mark][1 + int(STEPS_PER_E * log(age)) if age >= 1.0 else 0]
            if found is None or value < lowest or (value == lowest and run.turn < found.turn):
                lowest, found = value, run
        return found

    def _compute(self) -> list[list[float]]:
        """The index by class and age; ages beyond the last bucket have its index."""
        return [row + row[-1:] * (MAX_STEPS - BUCKETS) for row in self._table.compute(self._waiting, self._now)]


def _class(uses: int, access: Access) -> int:
    length = access.output_length
    return bisect_left(_USES, uses) * _KINDS + (_UNKNOWN if length is None else bisect_left(_OUTPUT_LENGTHS, length))


class Leaves:
    """A set of runs in a list; `place` is a run's position in it, so that sampling is fast."""

    def __init__(self, seed: int) -> None:
        self._runs: list[Run[Any]] = []
        self._random = random.Random(seed).random  # noqa: S311  # nothing here is a secret

    def add(self, run: Run[Any]) -> None:
        run.place = len(self._runs)
        self._runs.append(run)

    def discard(self, run: Run[Any]) -> None:
        last = self._runs.pop()
        if last is not run:
            self._runs[run.place] = last
            last.place = run.place
        run.place = -1

    def sample(self, count: int) -> Sequence[Run[Any]]:
        """`count` random runs, with repetitions; all of them, in no order, if there are no more."""
        runs, random = self._runs, self._random
        number = len(runs)
        return runs if number <= count else [runs[int(random() * number)] for _ in range(count)]
