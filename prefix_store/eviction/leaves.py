"""The runs that may lose blocks, to draw samples from."""

import random
from collections.abc import Sequence
from typing import Any

from prefix_store.eviction.run import Run


class Leaves:
    """A set in which a run's `place` is its place in a list, so that a sample costs nothing."""

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
        """So many of them by chance, with repetitions; all, in an order of their own, if there are not more."""
        runs, random = self._runs, self._random
        number = len(runs)
        return runs if number <= count else [runs[int(random() * number)] for _ in range(count)]
