"""Whether predicted risks come true, learned from judgements that the posterior had not seen: how much larger or
smaller risks are in truth, which answers were found wrong, and how reliable the predictions are by classes of risk.
"""

import bisect
import math
from statistics import NormalDist
from typing import Annotated

import msgspec

from cache.semantic.policy.ledger import max_risk
from cache.semantic.policy.policy import AnswerName, JudgeError, Label
from cache.semantic.policy.tallies import gamma_quantile

MAX_PENALTIES = 4096
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The upper bounds of the classes of predicted risk; the bound belongs to the class."""

# Of a Gamma distribution of the ratio before anything is known: wrong answers, and how many were expected.
_PRIOR_WRONG, _PRIOR_EXPECTED = 1.04, 0.8
_LEAST_WRONG = 0.3
_MOST_EXPECTED = 200.0
"""Older judgements fade beyond so many wrong answers that were expected: some hundred thousand requests."""
_LEAST = 0.25
# A miss is no hit, however near its risk was to what is served: it counts so much of an audit.
_MISS_WEIGHT = 0.65
_CONFIDENCE = 0.97

# A smaller penalty is none.
_NEGLIGIBLE = 0.3

# Labels in a class of risk.
_HALVED_AT = 4096
_QUANTILE = NormalDist().inv_cdf(0.975)  # for an interval of 95 %

_Penalty = Annotated[float, msgspec.Meta(gt=0.0, le=1e6)]
_Sum = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2 * _HALVED_AT)]


class Calibration(msgspec.Struct, array_like=True):
    """Audits say how many answers were wrong of those that were served, and how many of them were expected to be. The
    ratio has a Gamma posterior (wrong answers are rare, so their number is Poisson's); its 97 % quantile is reckoned
    with, so that few judgements leave it high and many let it come down, below 1 as well.

    Audits are few. Misses whose risk was a few times what is served are all judged, and show the same calibration a
    little farther up; each counts two thirds of an audit.

    `wrong` answers, and how many were `expected`, with what was assumed before any came.
    """

    wrong: Annotated[float, msgspec.Meta(ge=_LEAST_WRONG, le=1e9)] = _PRIOR_WRONG
    expected: Annotated[float, msgspec.Meta(ge=_PRIOR_EXPECTED, le=_MOST_EXPECTED)] = _PRIOR_EXPECTED

    @property
    def ratio(self) -> float:
        """Times as many wrong answers as the posterior says, 0.25 at least."""
        return max(_LEAST, gamma_quantile(self.wrong, _CONFIDENCE) / self.expected)

    def count(self, label: Label, recall: float, delta: float) -> None:
        """Count a judgement, before the posterior learns from it.

        `recall` is the judge's. Misses with a risk between `delta` and the highest that is served are counted.
        """
        if label.source == "audit":
            weight = 1.0
        elif label.source == "miss" and delta < label.risk <= max_risk(delta):
            weight = _MISS_WEIGHT
        else:
            return
        # A judge who calls some of the same answers different makes that many of the right ones look wrong.
        wrong = (not label.same) - (1.0 - recall) * (1.0 - label.risk)
        self.wrong = max(_LEAST_WRONG, self.wrong + weight * wrong)
        self.expected += weight * label.risk
        if self.expected > _MOST_EXPECTED:
            self.wrong = max(_LEAST_WRONG, self.wrong * _MOST_EXPECTED / self.expected)
            self.expected = _MOST_EXPECTED


class WrongAnswerRisk(msgspec.Struct, array_like=True):
    """How often each answer was found wrong, by audits and by users; each time that it was right halves it.

    The posterior rates kinds of questions, not answers, and so learns too late of a popular answer that has become
    wrong. With a penalty of p the risk of an answer is at least p / (p + 1): one finding takes it out of service, for
    all its questions, and two fresh answers that say the same bring it back. A user who rejects everything takes out
    only the answers served to that user.
    """

    penalties: Annotated[dict[AnswerName, _Penalty], msgspec.Meta(max_length=MAX_PENALTIES)] = {}
    """By answer, the oldest first."""

    def risk_of(self, answer: str) -> float:
        """The least probability that it is wrong."""
        penalty = self.penalties.get(answer, 0.0)
        return penalty / (penalty + 1.0)

    def rename(self, answer: str, former: str) -> None:
        """An answer that had two names has one."""
        self._raise_to(answer, self.penalties.pop(former, 0.0))

    def copy(self, answer: str, other: str) -> None:
        """An answer that was counted as another one was found wrong as often."""
        self._raise_to(answer, self.penalties.get(other, 0.0))

    def _raise_to(self, answer: str, penalty: float) -> None:
        if penalty > self.penalties.get(answer, 0.0):
            self._set(answer, penalty)

    def found(self, answer: str, same: bool, wrong: float = 1.0) -> None:
        """Record a judgement of an answer that was served, or would have been.

        `wrong` is the probability that one called different is wrong, since the judge errs.
        """
        penalty = self.penalties.get(answer, 0.0)
        penalty = penalty / 2 if same else penalty + wrong
        if penalty < _NEGLIGIBLE:
            self.penalties.pop(answer, None)
        else:
            self._set(answer, penalty)

    def _set(self, answer: str, penalty: float) -> None:
        self.penalties[answer] = penalty
        if len(self.penalties) > MAX_PENALTIES:
            del self.penalties[next(iter(self.penalties))]


class RiskClass(msgspec.Struct, array_like=True):
    """What is summed up of the labels in a class of risk. A label weighs 1 / chance, since it stands for so many.

    `weight` and `squares` are the sums of the weights and of their squares, `risk` that of weights times predicted
    risks, `different` that of the weights of labels that were not the same.

    Raises ValueError where the parts are more than the whole.
    """

    labels: _Count = 0
    audits: _Count = 0
    weight: _Sum = 0.0
    squares: _Sum = 0.0
    risk: _Sum = 0.0
    different: _Sum = 0.0

    def __post_init__(self) -> None:
        if max(self.risk, self.different) > self.weight * 1.000001 or self.audits > self.labels:
            raise ValueError("a class of risk has parts that are more than the whole")
        if self.labels and not (self.weight > 0.0 and self.squares > 0.0):
            raise ValueError("a class of risk has labels without a weight")

    def figures(self, judge: JudgeError) -> dict[str, float]:
        share = self.different / self.weight
        low, high = _interval(share, self.weight * self.weight / self.squares)
        return {
            "labels": self.labels,
            "audits": self.audits,
            "predicted": self.risk / self.weight,
            "observed": judge.wrong_among(share),
            "low": judge.wrong_among(low),
            "high": judge.wrong_among(high),
        }


class Reliability(msgspec.Struct, array_like=True):
    """Counts labels by what was predicted for them, before they are learned from.

    A label's risk was predicted without knowledge of it, so this is a test on data that the posterior had not seen.
    Misses near a neighbour are all judged, hits by the chance of their audit, whose inverse is their weight (Horvitz
    and Thompson); users' complaints are left out, since nobody tells of right answers. A class is halved when it has
    4,096 labels, so that the newest ones count most.
    """

    classes: Annotated[list[RiskClass], msgspec.Meta(min_length=len(BOUNDS), max_length=len(BOUNDS))] = msgspec.field(
        default_factory=lambda: [RiskClass() for _ in BOUNDS]
    )

    def count(self, label: Label) -> None:
        if label.source == "user":
            return
        found = self.classes[bisect.bisect_left(BOUNDS, label.risk)]
        weight = 1.0 / max(label.chance, 1.0 / _HALVED_AT) if label.source == "audit" else 1.0
        found.labels += 1
        found.audits += label.source == "audit"
        found.weight += weight
        found.squares += weight * weight
        found.risk += weight * label.risk
        found.different += weight * (not label.same)
        if found.labels >= _HALVED_AT:
            for name in found.__struct_fields__:
                value = getattr(found, name)
                setattr(found, name, value // 2 if isinstance(value, int) else value / 2)

    def figures(self, judge: JudgeError) -> list[dict[str, float]]:
        """The classes that have labels, the safest first; the judge's own mistakes are taken off.

        Of neighbours whose predicted risk was above `above` and at most `up_to`: the mean of what was `predicted`, and
        the share that was `observed` to be wrong, from `low` to `high` with 95 % confidence. `labels` are the
        judgements behind that, `audits` those of them that were of answers that had been served.
        """
        return [
            {"above": above, "up_to": up_to, **found.figures(judge)}
            for above, up_to, found in zip((0.0, *BOUNDS), BOUNDS, self.classes, strict=False)
            if found.labels
        ]


def _interval(share: float, number: float) -> tuple[float, float]:
    """Wilson's interval of a share of so many labels; of weighted ones, of as many as they are worth (Kish)."""
    square = _QUANTILE * _QUANTILE / number
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square * square / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
