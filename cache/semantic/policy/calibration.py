"""How many times as many answers are wrong as the posterior says, learned from judgements that it had not seen."""

import math
from typing import Annotated

import msgspec

from cache.semantic.policy.bound import gamma_quantile
from cache.semantic.policy.label import Label
from cache.semantic.policy.posterior import JudgeError

# Of a Gamma distribution of the ratio before anything is known: wrong answers, and how many were expected.
_PRIOR_WRONG, _PRIOR_EXPECTED = 1.04, 0.8
_LEAST_WRONG = 0.3
_CONFIDENCE = 0.93
_MOST_EXPECTED = 200.0
"""Older judgements fade beyond so many wrong answers that were expected: some hundred thousand requests."""
_LEAST = 0.25
# A miss is no hit, however near its risk was to what is served: it counts so much of an audit.
_MISS_WEIGHT = 0.4


class Calibration:
    """Audits say how many answers were wrong of those that were served, and how many of them were expected to be. The
    ratio has a Gamma posterior (wrong answers are rare, so their number is Poisson's); its 93 % quantile is reckoned
    with, so that few judgements leave it high and many let it come down, below 1 as well.

    Audits are few. Misses whose risk was a few times what is served are all judged, and show the same calibration a
    little farther up; each counts two fifths of an audit.

    Args:
        judge: how often labels are wrong that do not say so themselves.
        above, up_to: misses with a risk between these are counted.
    """

    def __init__(self, judge: JudgeError, above: float, up_to: float) -> None:
        self._judge = judge
        self._above = above
        self._up_to = up_to
        self._wrong = _PRIOR_WRONG
        self._expected = _PRIOR_EXPECTED

    @property
    def ratio(self) -> float:
        """Times as many wrong answers as the posterior says, 0.25 at least."""
        return max(_LEAST, gamma_quantile(self._wrong, _CONFIDENCE) / self._expected)

    def count(self, label: Label) -> None:
        """Count a judgement, before the posterior learns from it."""
        if label.source == "audit":
            weight = 1.0
        elif label.source == "miss" and self._above < label.risk <= self._up_to:
            weight = _MISS_WEIGHT
        else:
            return
        # A judge who calls some of the same answers different makes that many of the right ones look wrong.
        recall = self._judge.recall if label.judge is None else label.judge[0]
        wrong = (not label.same) - (1.0 - recall) * (1.0 - label.risk)
        self._wrong = max(_LEAST_WRONG, self._wrong + weight * wrong)
        self._expected += weight * label.risk
        if self._expected > _MOST_EXPECTED:
            self._wrong = max(_LEAST_WRONG, self._wrong * _MOST_EXPECTED / self._expected)
            self._expected = _MOST_EXPECTED

    def state(self) -> "CalibrationState":
        """What was learned."""
        return CalibrationState(self._wrong, self._expected)

    def restore(self, state: "CalibrationState") -> None:
        """Take over what was learned."""
        self._wrong, self._expected = state.wrong, state.expected


class CalibrationState(msgspec.Struct, frozen=True, array_like=True):
    """Wrong answers, and how many were expected, with what was assumed before any came."""

    wrong: Annotated[float, msgspec.Meta(ge=_LEAST_WRONG, le=1e9)]
    expected: Annotated[float, msgspec.Meta(ge=_PRIOR_EXPECTED, le=_MOST_EXPECTED)]

    def __post_init__(self) -> None:
        # A float of MessagePack may be NaN, for which the limits above say nothing.
        if not (math.isfinite(self.wrong) and math.isfinite(self.expected)):
            raise ValueError(f"calibration must be finite, and is {self.wrong} of {self.expected}")
