"""How likely a next use is, learned from those that came and those that did not."""

import numpy as np

from prefix_store.eviction.ages import BUCKETS, MIDDLES, WIDTHS, Floats, bucket
from prefix_store.eviction.waiting import Waiting

_PSEUDO_REUSES = 30.0
_POOL_PSEUDO_REUSES = 20.0
_PRIOR_SHARE = 0.3
_PRIOR_SECONDS = 20.0


class ReuseTable:
    """Reuses and exposure by class and age, and the index that follows from them.

    A class is one of `groups` (how often a block was used) times `kinds` (what used it last). The hazard of a cell is
    reuses / exposure, exposure being the seconds that blocks of the class spent at that age. Where little was seen it
    is drawn towards that of the group, and that towards the one of all, as by 30 reuses.
    """

    def __init__(self, groups: int, kinds: int, half_life: float, undecided: int | None = None) -> None:
        """`half_life` is how many calls of `compute` halve the weight of what was seen.

        `undecided` is a kind that blocks are of until it is known what they are. The hazard of its group stands for
        it: its own would say what happens to those that stay undecided, which most do not.
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
        self._new_reused[label][bucket(age)] += blocks

    def lose(self, label: int, age: float, blocks: int) -> None:
        """Blocks of a class were watched for `age` seconds, and are not any longer."""
        self._new_lost[label][bucket(age)] += blocks

    def change(self, label: int, other: int, age: float, blocks: int) -> None:
        """Blocks of a class are of another one from `age` seconds on: they leave the one, and enter the other there."""
        self._new_lost[label][bucket(age)] += blocks
        self._new_lost[other][bucket(age)] -= blocks

    def compute(self, waiting: Waiting, now: float) -> list[list[float]]:
        """The index of each class and age bucket: expected reuses per second of being kept.

        It is the largest of P(reuse within T) / E[seconds until reuse, at most T] over all T, the Gittins index of a
        block that is worth one reuse: a class that will be used only after a quiet time is not given up in it.
        """
        self._reused = self._fade * self._reused + np.array(self._new_reused)
        self._lost = self._fade * self._lost + np.array(self._new_lost)
        self._new_reused, self._new_lost = self._empty(), self._empty()
        return _index(self._hazards(self._lost + waiting.by_age(now))).tolist()  # type: ignore[no-any-return]

    def _hazards(self, censored: Floats) -> Floats:
        """Reuses per second, float64 [classes, BUCKETS].

        Those censored left at an age without having been reused, less those that entered the class at that age.
        """
        reused = self._reused.reshape(self._shape)
        left = (self._reused + censored).reshape(self._shape)
        later = left[..., ::-1].cumsum(-1)[..., ::-1] - left
        # What entered long ago weighs less than what leaves now, which is never less than nothing.
        exposure = WIDTHS * np.maximum(later + left / 2, 0.0)
        prior = _PRIOR_SHARE / (MIDDLES + _PRIOR_SECONDS)
        pool = _drawn(reused.sum((0, 1)), exposure.sum((0, 1)), prior, _POOL_PSEUDO_REUSES)
        groups = _drawn(reused.sum(1), exposure.sum(1), pool, _PSEUDO_REUSES)
        hazards = _drawn(reused, exposure, groups[:, None, :], _PSEUDO_REUSES)
        if self._undecided is not None:
            hazards[:, self._undecided] = groups
        return hazards.reshape(self.classes, BUCKETS)

    def _empty(self) -> list[list[int]]:
        return [[0] * BUCKETS for _ in range(self.classes)]


def _drawn(reused: Floats, exposure: Floats, towards: Floats, weight: float) -> Floats:
    return np.asarray((reused + weight) / (exposure + weight / towards))


def _index(hazards: Floats) -> Floats:
    """Of constant hazards within buckets, float64 [classes, BUCKETS] to the same."""
    spent = hazards * WIDTHS
    before = np.cumsum(spent, -1) - spent
    # [class, age bucket a, last bucket b]: alive at the beginning of b, given alive at the beginning of a.
    alive = np.triu(np.exp(-np.maximum(before[:, None, :] - before[:, :, None], 0.0)))
    reused = np.cumsum(alive * -np.expm1(-spent)[:, None, :], -1)
    held = np.cumsum(alive * (-np.expm1(-spent) / hazards)[:, None, :], -1)
    ratio = np.divide(reused, held, out=np.zeros_like(reused), where=held > 0)
    return np.asarray(ratio.max(-1))
