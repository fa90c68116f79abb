"""The likelihood of reuse, learned from observed reuses and their absence."""

from array import array

import numpy as np
import numpy.typing as npt

from prefix_store.eviction.age_histogram import AgeHistogram, Counts
from prefix_store.eviction.ages import BUCKETS, MIDDLES, WIDTHS, Floats, bucket

_PSEUDO_REUSES = 30.0
_POOL_PSEUDO_REUSES = 20.0
_PRIOR_SHARE = 0.3
_PRIOR_SECONDS = 20.0


class ReuseTable:
    """Reuses and exposure by class and age, and the index computed from them.

    A class is one of `groups` (how often a block was used) times `kinds` (what used it last). The hazard of a cell is
    reuses / exposure: the seconds that blocks of the class spent at that age. With few data it is shrunk towards that
    of the group, and that towards the overall one, with the weight of 30 reuses.
    """

    def __init__(self, groups: int, kinds: int, half_life: float, undecided: int | None = None) -> None:
        """`half_life`: calls of `compute` that halve the weight of an observation.

        `undecided`: the kind of blocks whose kind is not known yet. They have the hazard of their group: that of their
        own class would describe only blocks that stay undecided, which most do not.
        """
        self._shape = (groups, kinds, BUCKETS)
        self.classes = groups * kinds
        self._reused = np.zeros((self.classes, BUCKETS))
        self._lost = np.zeros((self.classes, BUCKETS))
        self._new_reused = self._empty()
        self._new_lost = self._empty()
        self._undecided = undecided
        self._fade = 0.5 ** (1.0 / half_life)

    def reuse(self, label: int, age: float, blocks: int) -> None:
        """Blocks of a class were used again after `age` seconds."""
        self._new_reused[label * BUCKETS + bucket(age)] += blocks

    def lose(self, label: int, age: float, blocks: int) -> None:
        """Blocks of a class were observed for `age` seconds, without a reuse."""
        self._new_lost[label * BUCKETS + bucket(age)] += blocks

    def change(self, label: int, other: int, age: float, blocks: int) -> None:
        """Blocks change their class at `age` seconds: they leave one and enter the other at that age."""
        self._new_lost[label * BUCKETS + bucket(age)] += blocks
        self._new_lost[other * BUCKETS + bucket(age)] -= blocks

    def compute(self, waiting: AgeHistogram, now: float) -> list[list[float]]:
        """The index of each class and age bucket: expected reuses per second in the cache.

        It is the largest of P(reuse within T) / E[seconds until reuse, at most T] over all T, the Gittins index of a
        block that is worth one reuse: a class that is reused only after a pause is not evicted in it.
        """
        self._reused = self._fade * self._reused + self._seen(self._new_reused)
        self._lost = self._fade * self._lost + self._seen(self._new_lost)
        self._new_reused, self._new_lost = self._empty(), self._empty()
        return _index(self._hazards(self._lost + waiting.by_age(now))).tolist()  # type: ignore[no-any-return]

    def _hazards(self, censored: Floats) -> Floats:
        """Reuses per second, float64 [classes, BUCKETS].

        `censored`: blocks that left at an age without a reuse, less those that entered at that age.
        """
        reused = self._reused.reshape(self._shape)
        left = (self._reused + censored).reshape(self._shape)
        later = left[..., ::-1].cumsum(-1)[..., ::-1] - left
        # An entry has faded more than the later exit, so the sums are not exact; exposure is at least 0.
        exposure = WIDTHS * np.maximum(later + left / 2, 0.0)
        prior = _PRIOR_SHARE / (MIDDLES + _PRIOR_SECONDS)
        pool = _drawn(reused.sum((0, 1)), exposure.sum((0, 1)), prior, _POOL_PSEUDO_REUSES)
        groups = _drawn(reused.sum(1), exposure.sum(1), pool, _PSEUDO_REUSES)
        hazards = _drawn(reused, exposure, groups[:, None, :], _PSEUDO_REUSES)
        if self._undecided is not None:
            hazards[:, self._undecided] = groups
        return hazards.reshape(self.classes, BUCKETS)

    def _empty(self) -> Counts:
        return array("q", bytes(8 * self.classes * BUCKETS))

    def _seen(self, counts: Counts) -> npt.NDArray[np.int64]:
        return np.frombuffer(counts, np.int64).reshape(self.classes, BUCKETS)


def _drawn(reused: Floats, exposure: Floats, towards: Floats, weight: float) -> Floats:
    return np.asarray((reused + weight) / (exposure + weight / towards))


def _index(hazards: Floats) -> Floats:
    """Of hazards constant within buckets; both are float64 [classes, BUCKETS]."""
    spent = (hazards * WIDTHS).T
    survives = np.exp(-spent)
    # [bucket, (reused, held), class]: expected within the bucket, for a block that reaches its beginning.
    within = np.empty((BUCKETS, 2, len(hazards)))
    np.negative(np.expm1(-spent), out=within[:, 0])
    np.divide(within[:, 0], hazards.T, out=within[:, 1])
    # [last bucket, ...]: the same from the beginning of an age's bucket to the end of a later one. The loop goes from
    # the last age down and reuses the result of the next age: it runs in an event loop, and takes a fifth of the time
    # of all pairs at once.
    until = np.zeros_like(within)
    found = np.empty((BUCKETS, len(hazards)))
    for age in reversed(range(BUCKETS)):
        later = until[age:]
        later *= survives[age]
        later += within[age]
        np.maximum.reduce(later[:, 0] / later[:, 1], 0, out=found[age])
    return found.T
