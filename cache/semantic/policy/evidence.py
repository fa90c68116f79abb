"""What the neighbours of a question say of whether one of their answers is right."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

NEIGHBOURS = 16
"""How many neighbours have a vote."""
FEATURES = 5

# A vote's weight grows by e for each twentieth of cosine similarity.
_SHARPNESS = 20.0
# Beside the neighbours votes one who knows no answer, as if it were so near: few or distant neighbours prove little.
_NOBODY = 0.55
_MIDDLE = 0.75
_SCALE = 5.0
_MOST_CERTAIN = 1e-3


class Evidence(NamedTuple):
    """The answer that the neighbours speak for, and how they do.

    `members` are the places of the neighbours that have this answer, nearest first. `features` are float64
    [FEATURES]: one, the similarity of the nearest of them, its margin over the nearest with another answer, the log
    odds of their share of the votes, and the log of their number.
    """

    members: tuple[int, ...]
    similarity: float
    features: npt.NDArray[np.float64]


def evidence_of(similarities: Floats, answers: Sequence[int]) -> Evidence:
    """Weigh the neighbours of a question.

    `similarities` are the cosines of the nearest entries, float [n], falling, 1 <= n <= NEIGHBOURS; `answers` say
    which of them have the same answer, by equal numbers.
    """
    weights = np.exp(_SHARPNESS * (np.asarray(similarities, dtype=np.float64) - 1.0))
    votes: dict[int, float] = {}
    for answer, weight in zip(answers, weights.tolist(), strict=True):
        votes[answer] = votes.get(answer, 0.0) + weight
    winner = max(votes, key=votes.__getitem__)
    members = tuple(place for place, answer in enumerate(answers) if answer == winner)
    nearest = float(similarities[members[0]])
    share = votes[winner] / (float(weights.sum()) + float(np.exp(_SHARPNESS * (_NOBODY - 1.0))))
    features = np.array(
        [
            1.0,
            (nearest - _MIDDLE) * _SCALE,
            (nearest - _rival(similarities, answers, winner)) * _SCALE,
            np.log((share + _MOST_CERTAIN) / (1.0 - share + _MOST_CERTAIN)),
            np.log(len(members)),
        ]
    )
    return Evidence(members, nearest, features)


def _rival(similarities: Floats, answers: Sequence[int], winner: int) -> float:
    """How near another answer is, or may be beyond the neighbours that were looked at."""
    for similarity, answer in zip(similarities, answers, strict=True):
        if answer != winner:
            return float(similarity)
    return float(similarities[-1]) if len(answers) == NEIGHBOURS else _NOBODY - 0.1
