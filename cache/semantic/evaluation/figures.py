"""The figures of a way to decide: how much of what it should serve it serves, and how much of what it should not."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]


class Figures(NamedTuple):
    """What came of serving some of a set of pairs; None where a share has no whole.

    `recall` is the share of the positive pairs that are served, `negatives_served` that of the negative ones, and
    `wrong_share_of_hits` the share of negative pairs among those served, 0 where none is. `wrong_per_request` is their
    share of all pairs: what a budget of wrong answers limits.
    """

    recall: float | None
    wrong_share_of_hits: float
    negatives_served: float | None
    wrong_per_request: float
    hits: int
    wrong_hits: int


def figures_of(served: Flags, same: Flags) -> Figures:
    """The figures of serving the pairs `served`, bool [pairs], of which `same` are right to serve, bool [pairs]."""
    hits, wrong = int(served.sum()), int((served & ~same).sum())
    positives, pairs = int(same.sum()), len(same)
    return Figures(
        recall=_share(hits - wrong, positives),
        wrong_share_of_hits=wrong / hits if hits else 0.0,
        negatives_served=_share(wrong, pairs - positives),
        wrong_per_request=wrong / pairs,
        hits=hits,
        wrong_hits=wrong,
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
