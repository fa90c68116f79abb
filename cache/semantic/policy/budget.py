"""A budget of wrong answers: the operator sets their share of all requests, and the policy spends no more."""

import math
import random
from dataclasses import replace

import msgspec

from cache.semantic.messages import RiskFeature
from cache.semantic.policy.audits import AuditLoad
from cache.semantic.policy.bound import WrongAnswers
from cache.semantic.policy.calibration import Calibration
from cache.semantic.policy.evidence import FEATURE_NAMES, evidence_of
from cache.semantic.policy.label import Label
from cache.semantic.policy.ledger import Ledger
from cache.semantic.policy.policy import (
    Assessment,
    Decision,
    Evidence,
    Neighbourhood,
    Policy,
    Refusal,
    RiskClassFigures,
)
from cache.semantic.policy.posterior import JudgeError, Posterior
from cache.semantic.policy.reliability import Reliability
from cache.semantic.policy.state import freeze, thaw
from cache.semantic.policy.wrong_answer_risk import WrongAnswerRisk

WARM_LABELS = 60
"""Judgements before anything is served."""
AUDIT_SHARE = 0.02
"""Share of all requests that are answered from the cache and asked upstream all the same, unless said otherwise."""

DEVIATIONS = 0.75
"""By so many standard deviations of its log odds a risk is taken too high."""
# Figures are corrected by the errors of the judges of the latest audits.
_NEWEST_ERROR = 0.05
_KIND = "budget"


def max_risk(delta: float) -> float:
    """Riskier answers are not served even where the budget has room for them.

    Whoever gets one has no use for averages: one in five is likely enough to be wrong. But an operator who allows many
    wrong answers allows risky ones too.
    """
    return min(0.5, max(0.1, 20.0 * delta))


class Learned(msgspec.Struct, array_like=True):
    """What is learned from labels, and saved."""

    posterior: Posterior = msgspec.field(default_factory=Posterior)
    calibration: Calibration = msgspec.field(default_factory=Calibration)
    wrong_answers: WrongAnswerRisk = msgspec.field(default_factory=WrongAnswerRisk)
    reliability: Reliability = msgspec.field(default_factory=Reliability)


class BudgetPolicy(Policy):
    """Serves the safest neighbours until `delta` of all requests may have got a wrong answer.

    Three corrections keep the promise where a plain posterior breaks it: the risk is taken three quarters of a standard
    deviation too high, it is multiplied by how many times as many wrong answers judgements found as were expected
    (Calibration), and what was spent is kept in a ledger (see there how the budget is spent). An answer that was found
    wrong is out of service until it is vindicated.

    A user's complaint says that one answer was wrong, if it is one at all (somebody else may have asked the same), and
    silence says nothing. So it takes that answer out of service, and teaches the posterior by its chance of having been
    an audit. All complaints together are a lower bound of what was wrong, with which the ledger reckons up to a limit;
    what is wrong is never estimated from them.

    Args:
        delta: share of requests that may get a wrong answer, (0, 1).
        judge: how often labels are wrong.
        chance: draws which hits are audited.
        audit_share: the most audits there may be, as a share of all requests.
    """

    def __init__(
        self, delta: float, judge: JudgeError, chance: random.Random, audit_share: float = AUDIT_SHARE
    ) -> None:
        if not 0.0 < delta < 1.0:
            raise ValueError(f"delta is {delta}; it must be a share of wrong answers between 0 and 1, such as 0.01.")
        self.delta = delta
        self._max_risk = max_risk(delta)
        self._usual_judge = self._judge = judge
        self.learned = Learned()
        self.wrong_answers = WrongAnswers()
        self._ledger = Ledger(delta)
        self._load = AuditLoad(audit_share, chance)

    @property
    def inflation(self) -> float:
        """How many times as many hits are wrong as the posterior says, by judgements or, if more, by complaints."""
        return max(self.learned.calibration.ratio, self._ledger.complained)

    def vote(self, neighbourhood: Neighbourhood) -> Evidence:
        return evidence_of(neighbourhood)

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        decision = self._decide(evidence, max_risk, compares)
        self.wrong_answers.decided(decision)
        return decision

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Assessment:
        decision = self._decision(self._plain_risk(evidence), self.inflation, max_risk)
        if decision.refusal == "warm-up":
            labels = self.learned.posterior.labels
            reason = f"it has learned from {labels} of the {WARM_LABELS} answers that it needs"
        else:
            limit = min(decision.limit or 0.0, max_risk)
            place = "within" if decision.serve else "above"
            reason = f"the risk {decision.risk:.4f} is {place} the limit {limit:.4f}"
        return Assessment(decision, reason)

    def features(self, evidence: Evidence) -> tuple[RiskFeature, ...]:
        posterior = self.learned.posterior
        values = [*evidence.features.tolist(), posterior.deviation(evidence.features)]
        parts = zip((*FEATURE_NAMES, "uncertainty"), values, [*(-posterior.mean).tolist(), DEVIATIONS], strict=True)
        found = [RiskFeature(name, value, weight, weight * value) for name, value, weight in parts if weight * value]
        return tuple(sorted(found, key=lambda feature: -abs(feature.log_odds)))

    def learn(self, label: Label) -> None:
        judge = self._usual_judge if label.judge is None else JudgeError(*label.judge)
        weight = label.chance if label.source == "user" else 1.0
        self.learned.posterior.learn(label.features, label.same, judge, weight)
        self.learned.calibration.count(label, judge.recall, self.delta, self._max_risk)
        self.learned.reliability.count(label)
        if label.same or label.source != "miss":
            sure = label.judge is None or label.source == "user"
            wrong = 1.0 if sure else judge.really_wrong(label.risk)
            self.learned.wrong_answers.found(label.answer, label.same, wrong)

    def settle(self, label: Label) -> None:
        if label.judge is not None and label.source == "audit":
            self._judge = self._judge.toward(JudgeError(*label.judge), _NEWEST_ERROR)
        self.wrong_answers.judged(label)
        if label.source == "user" and not label.same:
            self._ledger.complain()

    def snapshot(self) -> bytes:
        return freeze(_KIND, self.learned)

    def restore(self, state: bytes) -> None:
        self.learned = thaw(state, _KIND, Learned)

    def figures(self) -> dict[str, float]:
        """Wrong answers are per request and as audits show; `upper` holds with 95 % confidence."""
        ever, recent = self.wrong_answers.all, self.wrong_answers.recent
        return {
            "delta": self.delta,
            "labels": self.learned.posterior.labels,
            "warm_labels": WARM_LABELS,
            "inflation": self.inflation,
            "most_risk": min(self._ledger.limit, self._max_risk),
            "requests": ever.requests,
            "hits": ever.hits,
            "audits": ever.audits,
            "found_wrong": ever.found_wrong,
            "complaints": ever.complaints,
            "wrong": ever.wrong_share(self._judge).estimate,
            "wrong_upper": ever.wrong_share(self._judge).upper,
            "recent_wrong": recent.wrong_share(self._judge).estimate,
            "recent_wrong_upper": recent.wrong_share(self._judge).upper,
        }

    def reliability(self) -> list[RiskClassFigures]:
        return self.learned.reliability.figures(self._judge)

    def _decide(self, evidence: Evidence | None, max_risk: float, compares: bool) -> Decision:
        self._load.request()
        inflation = self.inflation
        if evidence is None:
            self._ledger.request(math.inf, inflation)
            return Decision(False, 1.0, inflation=inflation, refusal="none near")
        plain = self._plain_risk(evidence)
        self._ledger.request(plain, inflation)
        decision = self._decision(plain, inflation, max_risk)
        if not decision.serve:
            return decision
        self._ledger.spend(inflation * plain, plain)
        chance = 1.0 if compares else self._load.chance_of(plain)
        return replace(decision, audit=compares or self._load.draw(chance), audit_chance=chance)

    def _plain_risk(self, evidence: Evidence) -> float:
        """Before the correction by judgements."""
        by_posterior = self.learned.posterior.wrong(evidence.features, DEVIATIONS)
        return max(by_posterior, self.learned.wrong_answers.risk_of(evidence.answer))

    def _decision(self, plain_risk: float, inflation: float, max_risk: float) -> Decision:
        """What is decided of a risk, before any audit is drawn."""
        risk = min(1.0, inflation * plain_risk)
        limit = min(self._ledger.limit, self._max_risk)
        if self.learned.posterior.labels < WARM_LABELS:
            refusal: Refusal = "warm-up"
        else:
            refusal = "risk" if risk > limit else "max-risk" if risk > max_risk else ""
        return Decision(not refusal, risk, plain_risk, limit=limit, inflation=inflation, refusal=refusal)
