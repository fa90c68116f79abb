"""What the neighbours of a question say of whether one of their answers is right."""

import math

import numpy as np

from cache.semantic.policy.policy import NEIGHBOURS, Evidence, Neighbourhood
from cache.semantic.wording.comparison import FEATURE_NAMES as TEXT_FEATURE_NAMES

FEATURE_NAMES = (
    *("constant", "similarity", "margin", "votes", "count", "similarity²", "margin²", "votes²"),
    *("similarity·votes", "margin·votes", "count·votes", "similarity·margin"),
    *TEXT_FEATURE_NAMES,
)
"""In their order: those of the neighbours, and those of their texts."""
FEATURES = len(FEATURE_NAMES)

# A vote's weight grows by e for each twentieth of cosine similarity.
_SHARPNESS = 20.0
# Beside the neighbours votes one who knows no answer, as if it were so near: few or distant neighbours prove little.
_NOBODY = 0.55
_MIDDLE = 0.75
_SCALE = 5.0
_MAX_CERTAIN = 1e-3
# Texts that were not compared are in nothing unusual.
_UNREAD = (0.0,) * len(TEXT_FEATURE_NAMES)


def evidence_of(neighbourhood: Neighbourhood) -> Evidence:
    """Count the votes of a question's neighbours.

    The features are, float64 [FEATURES], the last of them for the comparison of the texts: one; the similarity s of the
    nearest neighbour with the answer that has most votes; its margin m over the nearest with another answer; the log
    odds v of the answer's share of the votes; the log n of how many have it; and the products s², m², v²/4, s·v/2,
    m·v/2, n·v/2, s·m. Log odds that are linear in s, m, v and n overestimate the risk where most hits are.
    """
    entries, similarities, answers = neighbourhood
    votes: dict[str, float] = {}
    for answer, similarity in zip(answers, similarities, strict=True):
        votes[answer] = votes.get(answer, 0.0) + math.exp(_SHARPNESS * (similarity - 1.0))
    winner = max(votes, key=votes.__getitem__)
    members = tuple(place for place, answer in enumerate(answers) if answer == winner)
    nearest = float(similarities[members[0]])
    # Another answer may be beyond the neighbours that were looked at.
    beyond = float(similarities[-1]) if len(answers) == NEIGHBOURS else _NOBODY - 0.1
    rival = next((float(each) for each, answer in zip(similarities, answers, strict=True) if answer != winner), beyond)
    share = votes[winner] / (sum(votes.values()) + math.exp(_SHARPNESS * (_NOBODY - 1.0)))
    s = (nearest - _MIDDLE) * _SCALE
    m = (nearest - rival) * _SCALE
    v = math.log((share + _MAX_CERTAIN) / (1.0 - share + _MAX_CERTAIN))
    n = math.log(len(members))
    features = np.array([1.0, s, m, v, n, s * s, m * m, v * v / 4, s * v / 2, m * v / 2, n * v / 2, s * m, *_UNREAD])
    return Evidence(members, entries[members[0]], winner, nearest, features)
