"""A budget of wrong answers: the operator sets their share of all requests, and the policy spends no more."""

import math
import random
from collections import deque

import numpy as np

from cache.semantic.policy.evidence import evidence_of
from cache.semantic.policy.policy import Decision, Evidence, Label, Neighbourhood
from cache.semantic.policy.posterior import JudgeError, Posterior

HORIZON = 2000
"""Requests over which the budget is kept."""
WARM_LABELS = 60
"""Judgements before anything is served."""
MOST_RISK = 0.5
"""Riskier answers are not served even where the budget has room for them: whoever gets one has no use for averages."""

_DEVIATIONS = 1.0
_REPLAN_EVERY = 25
_AUDIT_SHARE = 0.02
# Audits are five times as frequent at first, and this many hits later the extra ones have fallen to a third.
_EARLY_AUDITS, _EARLY_HITS = 4.0, 300.0
_TYPICAL_RISK = 0.01
# What is known of the posterior's error before any audit: 1.3 times as many wrong answers as it says, on so many hits.
_PRIOR_INFLATION, _PRIOR_AUDITS = 1.3, 40.0
_PRIOR_RISK = 0.02


class BudgetPolicy:
    """Serves the safest neighbours until `delta` of all requests may have got a wrong answer.

    The best use of such a budget is one limit of risk for all requests. It is set so that the risks below it, over the
    last HORIZON requests and whatever was served of them, add up to the budget and what is left over from before:

        risk     .001 .002 .004 | .03 .2 .9
        running  .001 .003 .007 | .037          budget .01: served are the first three

    Three corrections keep the promise where a plain posterior breaks it: the risk is taken one standard deviation too
    high, it is multiplied by how much more often audits found a wrong answer than was expected (never less than 1),
    and what was spent is kept in a ledger.

    Args:
        delta: share of requests that may get a wrong answer.
        chance: draws which hits are audited.
    """

    def __init__(self, delta: float, judge: JudgeError, chance: random.Random) -> None:
        self.delta = delta
        self.posterior = Posterior(judge)
        self._judge = judge
        self._chance = chance
        self._risks: deque[float] = deque(maxlen=HORIZON)
        self._limit = 0.0
        self._balance = 0.0
        self._hits = 0
        self._requests = 0
        self._audited_wrong = _PRIOR_INFLATION * _PRIOR_AUDITS * _PRIOR_RISK
        self._audited_risk = _PRIOR_AUDITS * _PRIOR_RISK

    @property
    def inflation(self) -> float:
        """How many times as many hits are wrong as the posterior says."""
        return max(1.0, self._audited_wrong / self._audited_risk)

    def weigh(self, neighbourhood: Neighbourhood) -> Evidence:
        return evidence_of(neighbourhood)

    def decide(self, evidence: Evidence | None, most_risk: float = 1.0) -> Decision:
        self._requests += 1
        self._balance = min(self._balance + self.delta, self.delta * HORIZON)
        plain = math.inf if evidence is None else self.posterior.wrong(evidence.features, _DEVIATIONS)
        self._risks.append(plain)
        if self._requests % _REPLAN_EVERY == 0:
            self._replan()
        risk = min(1.0, self.inflation * plain)
        if evidence is None or self.posterior.labels < WARM_LABELS or risk > min(self._limit, MOST_RISK, most_risk):
            return Decision(False, risk)
        self._hits += 1
        self._balance -= risk
        return Decision(True, risk, self._chance.random() < self._audit_chance(plain))

    def learn(self, label: Label) -> None:
        features, same = label.evidence.features, label.same
        if label.audited:
            expected = self.posterior.wrong(features, _DEVIATIONS)
            # A judge who calls some of the same answers different makes that many of the right ones look wrong.
            self._audited_wrong += (not same) - (1.0 - self._judge.recall) * (1.0 - expected)
            self._audited_risk += expected
        self.posterior.learn(features, same)

    def _audit_chance(self, risk: float) -> float:
        early = 1.0 + _EARLY_AUDITS * math.exp(-self._hits / _EARLY_HITS)
        return min(1.0, _AUDIT_SHARE * early * math.sqrt(max(risk, 1e-4) / _TYPICAL_RISK))

    def _replan(self) -> None:
        risks = np.array(self._risks)
        safest = np.sort(risks[np.isfinite(risks)]) * self.inflation
        budget = self.delta * len(risks)
        allowed = budget + 0.5 * max(-budget, min(self._balance, budget / 2))
        within = int(np.searchsorted(np.cumsum(safest), allowed))
        self._limit = float(safest[within - 1]) if within else 0.0
