"""What the neighbours of a question say of one of their answers, and the probability that it is right, which is learned
from one judgement at a time.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from cache.semantic.policy.policy import NEIGHBOURS, Evidence, FeatureVector, JudgeError
from cache.semantic.policy.state import UnusableState
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

# Before anything is learned, near what different streams teach: likelier right the nearer, the clearer and the more
# agreed; and not at all sure of it. A word that only the new question has makes a near-copy wrong until the traffic
# shows that it does not.
_PRIOR_MEAN = (
    *(-1.2, 0.2, 0.7, 0.5, 0.6),  # the constant, s, m, v, n
    *(0.2, 0.0, -0.1, 0.1, 0.0, 0.5, 0.0),  # s², m², v²/4, s·v/2, m·v/2, n·v/2, s·m
    *(-4.0, -4.0, 0.1, -0.3, 0.0, 0.0),  # replaced, inserted, overlap, novelty, and the squares of these two
)
_PRIOR_PRECISION = 1.0
_MAX_LOGIT = 30.0
_MIN_DOUBT = 1e-12
_HALVINGS = 24
# What is known fades over so many labels, as the world goes on; every so many, some of it is forgotten.
_MEMORY = 10_000.0
_FORGET_EVERY = 100


def evidence_of(neighbours: Sequence[tuple[str, float]]) -> Evidence:
    """Count the votes of a question's neighbours; see `Policy.vote`.

    The features are, float64 [FEATURES], the last of them for the comparison of the texts: one; the similarity s of the
    nearest neighbour with the answer that has most votes; its margin m over the nearest with another answer; the log
    odds v of the answer's share of the votes; the log n of how many have it; and the products s², m², v²/4, s·v/2,
    m·v/2, n·v/2, s·m. Log odds that are linear in s, m, v and n overestimate the risk where most hits are.
    """
    votes: dict[str, float] = {}
    for answer, similarity in neighbours:
        votes[answer] = votes.get(answer, 0.0) + math.exp(_SHARPNESS * (similarity - 1.0))
    winner = max(votes, key=votes.__getitem__)
    members = tuple(place for place, (answer, _) in enumerate(neighbours) if answer == winner)
    nearest = neighbours[members[0]][1]
    # Another answer may be beyond the neighbours that were looked at.
    beyond = neighbours[-1][1] if len(neighbours) == NEIGHBOURS else _NOBODY - 0.1
    rival = next((similarity for answer, similarity in neighbours if answer != winner), beyond)
    share = votes[winner] / (sum(votes.values()) + math.exp(_SHARPNESS * (_NOBODY - 1.0)))
    s = (nearest - _MIDDLE) * _SCALE
    m = (nearest - rival) * _SCALE
    v = math.log((share + _MAX_CERTAIN) / (1.0 - share + _MAX_CERTAIN))
    n = math.log(len(members))
    features = np.array([1.0, s, m, v, n, s * s, m * m, v * v / 4, s * v / 2, m * v / 2, n * v / 2, s * m, *_UNREAD])
    return Evidence(members, winner, nearest, features)


class Posterior(msgspec.Struct, array_like=True, eq=False):
    """Bayesian logistic regression with a Gaussian over its weights, updated label by label.

    One model serves all entries of a deployment (what one entry saw alone is too little), and it starts from a broad
    prior in each, because what is learned from one deployment's questions is wrong for another's. Labels come from a
    judge who errs, so that a label is seen as the noisy one it is: the likelihood of "same" is
    `false_same + (recall - false_same) * sigmoid(weights . features)`.

    `mean` is float64 [FEATURES], `covariance` float64 [FEATURES, FEATURES], `labels` how many it was learned from.
    Raises ValueError unless that is a Gaussian, and no wider than the prior.
    """

    mean: FeatureVector = msgspec.field(default_factory=lambda: np.array(_PRIOR_MEAN))
    covariance: npt.NDArray[np.float64] = msgspec.field(default_factory=lambda: np.eye(FEATURES) / _PRIOR_PRECISION)
    labels: Annotated[int, msgspec.Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if self.mean.shape != (FEATURES,) or self.covariance.shape != (FEATURES, FEATURES):
            raise ValueError(f"mean and covariance must be of {FEATURES} features")
        are_finite = np.isfinite(self.mean).all() and np.isfinite(self.covariance).all()
        if not are_finite or not np.allclose(self.covariance, self.covariance.T, rtol=1e-6, atol=1e-12):
            raise ValueError("mean and covariance must be finite, and the covariance symmetric")
        widths = np.linalg.eigvalsh(self.covariance)
        if not 0.0 < widths[0] <= widths[-1] <= 1.000001 / _PRIOR_PRECISION:
            raise ValueError("covariance must be positive definite, and no wider than before anything was learned")

    def wrong(self, features: FeatureVector, deviations: float) -> float:
        """The probability that the answer is wrong, taken so many standard deviations of the log odds too high."""
        return 1.0 - sigmoid(float(self.mean @ features) - deviations * self.deviation(features))

    def deviation(self, features: FeatureVector) -> float:
        """The standard deviation of the log odds."""
        return math.sqrt(float(features @ self.covariance @ features))

    def learn(self, told: npt.ArrayLike, same: bool, judge: JudgeError, weight: float = 1.0) -> None:
        """Take over one judgement: whether the right answer was the one that the features `told` speak for.

        `weight` is how much of a label it is, [0, 1]; `judge` who judged. Raises UnusableState, and has learned
        nothing, where the features are others, or what would be learned is not finite.
        """
        features = np.asarray(told, dtype=np.float64)
        if features.shape != (FEATURES,):
            raise UnusableState(f"a label has {features.size} features; this policy judges by {FEATURES}")
        carried = self.covariance @ features
        spread = float(features @ carried)
        logit = float(self.mean @ features)
        pull = _pull(logit, spread, same, weight, judge)
        mean = self.mean + carried * pull
        information = weight * _slopes(logit + spread * pull, same, judge)[1]
        covariance = self.covariance - np.outer(carried, carried) * (information / (1.0 + information * spread))
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all()):
            raise UnusableState("a label has features with which nothing finite can be learned")
        self.mean, self.covariance = mean, covariance
        self.labels += 1
        if self.labels % _FORGET_EVERY == 0:
            self._forget()

    def _forget(self) -> None:
        """Let the precision fade toward that of the prior, and no further (Kulhavy and Zarrop's stabilized forgetting).

        It keeps the covariance symmetric and positive definite as well, whatever the updates have rounded.
        """
        kept = 1.0 - _FORGET_EVERY / _MEMORY
        precision = kept * np.linalg.inv(self.covariance) + (1.0 - kept) * _PRIOR_PRECISION * np.eye(FEATURES)
        covariance = np.linalg.inv(precision)
        self.covariance = (covariance + covariance.T) / 2


def _pull(logit: float, spread: float, same: bool, weight: float, judge: JudgeError) -> float:
    """How far along its features a label moves the weights: to where the prior pulls back as hard.

    That is the most likely weights given the label, which a step by the slope where the weights are now can miss
    by far.
    """
    low, high = (0.0, 1.0) if same else (-1.0, 0.0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if weight * _slopes(logit + spread * middle, same, judge)[0] > middle:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _slopes(logit: float, same: bool, judge: JudgeError) -> tuple[float, float]:
    """Of the log likelihood by the log odds: its first derivative, and the information (Fisher's)."""
    right = sigmoid(logit)
    informed = judge.recall - judge.false_same
    said = judge.false_same + informed * right
    slope = informed * right * (1.0 - right)
    doubt = max(said * (1.0 - said), _MIN_DOUBT)
    return slope / doubt * (same - said), slope * slope / doubt


def sigmoid(logit: float) -> float:
    """The probability of these log odds."""
    return 1.0 / (1.0 + math.exp(-max(-_MAX_LOGIT, min(_MAX_LOGIT, logit))))
