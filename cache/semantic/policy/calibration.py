"""How many times as many answers are wrong as the posterior says, learned from judgements that it had not seen."""

from typing import Annotated

import msgspec

from cache.semantic.policy.bound import gamma_quantile
from cache.semantic.policy.label import Label

# Of a Gamma distribution of the ratio before anything is known: wrong answers, and how many were expected.
_PRIOR_WRONG, _PRIOR_EXPECTED = 1.04, 0.8
_LEAST_WRONG = 0.3
_CONFIDENCE = 0.95
_MOST_EXPECTED = 200.0
"""Older judgements fade beyond so many wrong answers that were expected: some hundred thousand requests."""
_LEAST = 0.25
# A miss is no hit, however near its risk was to what is served: it counts so much of an audit.
_MISS_WEIGHT = 0.4


class Calibration(msgspec.Struct, array_like=True):
    """Audits say how many answers were wrong of those that were served, and how many of them were expected to be. The
    ratio has a Gamma posterior (wrong answers are rare, so their number is Poisson's); its 95 % quantile is reckoned
    with, so that few judgements leave it high and many let it come down, below 1 as well.

    Audits are few. Misses whose risk was a few times what is served are all judged, and show the same calibration a
    little farther up; each counts two fifths of an audit.

    `wrong` answers, and how many were `expected`, with what was assumed before any came.
    """

    wrong: Annotated[float, msgspec.Meta(ge=_LEAST_WRONG, le=1e9)] = _PRIOR_WRONG
    expected: Annotated[float, msgspec.Meta(ge=_PRIOR_EXPECTED, le=_MOST_EXPECTED)] = _PRIOR_EXPECTED

    @property
    def ratio(self) -> float:
        """Times as many wrong answers as the posterior says, 0.25 at least."""
        return max(_LEAST, gamma_quantile(self.wrong, _CONFIDENCE) / self.expected)

    def count(self, label: Label, recall: float, above: float, up_to: float) -> None:
        """Count a judgement, before the posterior learns from it.

        `recall` is the judge's. Misses with a risk between `above` and `up_to` are counted.
        """
        if label.source == "audit":
            weight = 1.0
        elif label.source == "miss" and above < label.risk <= up_to:
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
