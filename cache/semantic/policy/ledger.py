"""What may still be spent of the budget of wrong answers, and how risky an answer it pays for."""

from collections import deque

import numpy as np

HORIZON = 2000
"""Requests over which the budget is kept."""

_REPLAN_EVERY = 25
# What is left over, or missing, is spent or saved over two horizons, so that a rich ledger does not squander.
_PATIENCE = 0.5
# As if so much had been expected to be wrong before the first complaint, so that a few prove nothing; and the most that
# complaints may make of a risk, because not everybody who complains is right.
_PRIOR_COMPLAINTS = 2.0
_MAX_COMPLAINED = 2.0


def max_risk(delta: float) -> float:
    """Riskier answers are not served even where the budget has room for them.

    Whoever gets one has no use for averages: one in five is likely enough to be wrong. But an operator who allows many
    wrong answers allows risky ones too.
    """
    return min(0.5, max(0.1, 20.0 * delta))


class Ledger:
    """Sets one limit of risk for all requests, which is the best use of a budget of wrong answers.

    It is set so that the risks below it, over the last HORIZON requests and whatever was served of them, add up to
    the budget and half of what is left over from before (of the budget at most), but no higher than `max_risk`:

        risk     .001 .002 .004 | .03 .2 .9
        running  .001 .003 .007 | .037          allowed .01 in all: served are the first three

    A ledger is one process's own. It starts empty: a process that begins again has spent nothing and saved nothing.

    Args:
        delta: share of requests that may get a wrong answer.
    """

    def __init__(self, delta: float) -> None:
        self._delta = delta
        self._risks: deque[float] = deque(maxlen=HORIZON)
        self._balance = 0.0
        self._requests = 0
        # Both fade over a horizon.
        self._expected = 0.0
        self._complaints = 0.0
        self.limit = 0.0

    @property
    def complained(self) -> float:
        """How many times as many of the recent hits were complained of as were expected to be wrong."""
        return min(_MAX_COMPLAINED, self._complaints / (self._expected + _PRIOR_COMPLAINTS))

    def request(self, plain_risk: float, inflation: float) -> None:
        """Each request brings delta of a wrong answer. `plain_risk` is infinite where nothing can be served."""
        self._requests += 1
        self._balance = min(self._balance + self._delta, self._delta * HORIZON)
        self._risks.append(plain_risk)
        self._expected -= self._expected / HORIZON
        self._complaints -= self._complaints / HORIZON
        if self._requests % _REPLAN_EVERY == 0:
            self._plan(inflation)

    def spend(self, risk: float, plain_risk: float) -> None:
        """An answer was served; `risk` is what is reckoned with, `plain_risk` what the posterior says."""
        self._balance -= risk
        self._expected += plain_risk

    def complain(self) -> None:
        """A user has complained of an answer that was served, which may have been right."""
        self._complaints += 1.0

    def _plan(self, inflation: float) -> None:
        risks = np.array(self._risks)
        safest = np.sort(risks[np.isfinite(risks)]) * inflation
        budget = self._delta * len(risks)
        allowed = budget + _PATIENCE * max(-budget, min(self._balance, budget / 2))
        within = int(np.searchsorted(np.cumsum(safest), allowed))
        self.limit = min(max_risk(self._delta), float(safest[within - 1])) if within else 0.0
