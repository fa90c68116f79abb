"""How reliable the predicted risks are: by classes of risk, what was predicted and what judgements have shown."""

import bisect
import math
from typing import Annotated

import msgspec

from cache.semantic.policy.label import Label
from cache.semantic.policy.policy import RiskClassFigures
from cache.semantic.policy.posterior import JudgeError

BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The upper bounds of the classes of predicted risk; the bound belongs to the class."""

_HALVED_AT = 4096
# The normal quantile of 97.5 %, for an interval of 95 %.
_QUANTILE = 1.959963984540054
_MOST = 1e12

_Sum = Annotated[float, msgspec.Meta(ge=0.0, le=_MOST)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2 * _HALVED_AT)]


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

    def figures(self, above: float, up_to: float, judge: JudgeError) -> RiskClassFigures:
        share = self.different / self.weight
        low, high = _interval(share, self.weight * self.weight / self.squares)
        observed, low, high = map(judge.wrong_among, (share, low, high))
        predicted = self.risk / self.weight
        return RiskClassFigures(above, up_to, self.labels, self.audits, predicted, observed, low, high)


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

    def figures(self, judge: JudgeError) -> list[RiskClassFigures]:
        """The classes that have labels, the safest first; the judge's own mistakes are taken off."""
        return [
            found.figures(above, up_to, judge)
            for above, up_to, found in zip((0.0, *BOUNDS), BOUNDS, self.classes, strict=False)
            if found.labels
        ]


def _interval(share: float, number: float) -> tuple[float, float]:
    """Wilson's interval of a share of so many labels; of weighted ones, of as many as they are worth (Kish)."""
    square = _QUANTILE * _QUANTILE / number
    middle = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square * square / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
