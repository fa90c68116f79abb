"""A budget of wrong answers: the operator sets their share of all requests, and the policy spends no more."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from cache.semantic.messages import RiskFeature
from cache.semantic.policy.audits import AuditLoad
from cache.semantic.policy.calibration import Calibration, Reliability, WrongAnswerRisk
from cache.semantic.policy.groups import Agreement, AnswerGroups
from cache.semantic.policy.ledger import Ledger
from cache.semantic.policy.policy import Decision, EqualAnswers, Evidence, JudgeError, Label, Policy, Refusal
from cache.semantic.policy.posterior import FEATURE_NAMES, Posterior, evidence_of
from cache.semantic.policy.state import freeze, thaw
from cache.semantic.policy.tallies import Tallies

WARM_LABELS = 60
"""Judgements before anything is served."""
AUDIT_SHARE = 0.02
"""Share of all requests that are answered from the cache and asked upstream all the same, unless said otherwise."""

DEVIATIONS = 0.75
"""By so many standard deviations of its log odds a risk is taken too high."""
# Figures are corrected by the errors of the judges of the latest audits.
_NEWEST_ERROR = 0.05
_KIND = "budget"


class Learned(msgspec.Struct, array_like=True):
    """What is learned from labels, and saved."""

    posterior: Posterior = msgspec.field(default_factory=Posterior)
    calibration: Calibration = msgspec.field(default_factory=Calibration)
    wrong_answers: WrongAnswerRisk = msgspec.field(default_factory=WrongAnswerRisk)
    reliability: Reliability = msgspec.field(default_factory=Reliability)
    groups: AnswerGroups = msgspec.field(default_factory=AnswerGroups)


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
        self.delta = delta
        self._usual_judge = self._judge = judge
        self.learned = Learned()
        self.tallies = Tallies()
        self._ledger = Ledger(delta)
        self._load = AuditLoad(audit_share, chance)
        self._agreement = Agreement()

    @property
    def inflation(self) -> float:
        """How many times as many hits are wrong as the posterior says, by judgements or, if more, by complaints."""
        return max(self.learned.calibration.ratio, self._ledger.complained)

    def vote(self, neighbours: Sequence[tuple[str, float]]) -> Evidence:
        return evidence_of([(self.name_of(answer), similarity) for answer, similarity in neighbours])

    def name_of(self, answer: str) -> str:
        return self.learned.groups.name_of(answer)

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        plain_risk, inflation = self._plain_risk(evidence), self.inflation
        self._load.request()
        self._ledger.request(plain_risk, inflation)
        decision = self._within_limits(plain_risk, inflation, max_risk)
        if decision.serve:
            self._ledger.spend(inflation * plain_risk, plain_risk)
            audit, chance = (True, 1.0) if compares else self._load.draw(plain_risk)
            decision = replace(decision, audit=audit, audit_chance=chance)
        self.tallies.count_request(decision)
        return decision

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Decision:
        return self._within_limits(self._plain_risk(evidence), self.inflation, max_risk)

    def reason(self, evidence: Evidence, decision: Decision, max_risk: float) -> str:
        if decision.refusal == "warm-up":
            labels = self.learned.posterior.labels
            return f"it has learned from {labels} of the {WARM_LABELS} answers that it needs"
        place = "within" if decision.serve else "above"
        return f"the risk {decision.risk:.4f} is {place} the limit {min(self._ledger.limit, max_risk):.4f}"

    def features(self, evidence: Evidence) -> tuple[RiskFeature, ...]:
        posterior = self.learned.posterior
        values = [*evidence.features.tolist(), posterior.deviation(evidence.features)]
        parts = zip((*FEATURE_NAMES, "uncertainty"), values, [*(-posterior.mean).tolist(), DEVIATIONS], strict=True)
        found = [RiskFeature(name, value, weight, weight * value) for name, value, weight in parts if weight * value]
        return tuple(sorted(found, key=lambda feature: -abs(feature.log_odds)))

    def learn(self, label: Label) -> None:
        judge = label.judge or self._usual_judge
        weight = label.chance if label.source == "user" else 1.0
        self.learned.posterior.learn(label.features, label.same, judge, weight)
        self.learned.calibration.count(label, judge.recall, self.delta)
        self.learned.reliability.count(label)
        if label.same or label.source != "miss":
            sure = label.judge is None or label.source == "user"
            wrong = 1.0 if sure else judge.really_wrong(label.risk)
            self.learned.wrong_answers.found(self.name_of(label.answer), label.same, wrong)

    def names_to_join(self, said: Mapping[str, bool], judge: JudgeError) -> list[EqualAnswers]:
        return self._agreement.judged(said, judge)

    def join(self, equal: EqualAnswers) -> None:
        if joined := self.learned.groups.join(equal):
            self.learned.wrong_answers.rename(*joined)
        if separated := self.learned.groups.separate():
            self.learned.wrong_answers.copy(*separated)

    def settle(self, label: Label) -> None:
        if label.judge is not None and label.source == "audit":
            self._judge = self._judge.toward(label.judge, _NEWEST_ERROR)
        self.tallies.count_label(label)
        if label.source == "user" and not label.same:
            self._ledger.complain()

    def snapshot(self) -> bytes:
        return freeze(_KIND, self.learned)

    def restore(self, state: bytes) -> None:
        self.learned = thaw(state, _KIND, Learned)

    def figures(self) -> dict[str, float]:
        """Wrong answers are per request and as audits show; `upper` holds with 95 % confidence."""
        ever = self.tallies.all
        wrong, wrong_upper = ever.wrong_share(self._judge)
        recent_wrong, recent_wrong_upper = self.tallies.recent.wrong_share(self._judge)
        return {
            "delta": self.delta,
            "labels": self.learned.posterior.labels,
            "warm_labels": WARM_LABELS,
            "joined_answers": len(self.learned.groups.joined),
            "inflation": self.inflation,
            "most_risk": self._ledger.limit,
            "requests": ever.requests,
            "hits": ever.hits,
            "audits": ever.audits,
            "found_wrong": ever.found_wrong,
            "complaints": ever.complaints,
            "wrong": wrong,
            "wrong_upper": wrong_upper,
            "recent_wrong": recent_wrong,
            "recent_wrong_upper": recent_wrong_upper,
        }

    def reliability(self) -> list[dict[str, float]]:
        return self.learned.reliability.figures(self._judge)

    def _plain_risk(self, evidence: Evidence | None) -> float:
        """Before the correction by judgements."""
        if evidence is None:
            return math.inf
        by_posterior = self.learned.posterior.wrong(evidence.features, DEVIATIONS)
        return max(by_posterior, self.learned.wrong_answers.risk_of(evidence.answer))

    def _within_limits(self, plain_risk: float, inflation: float, max_risk: float) -> Decision:
        """Whether a risk is within the limits of the policy and of the request, before any audit is drawn."""
        risk, limit = min(1.0, inflation * plain_risk), self._ledger.limit
        refusal: Refusal = "risk" if risk > limit else "max-risk" if risk > max_risk else ""
        if plain_risk == math.inf:
            refusal = "none near"
        elif self.learned.posterior.labels < WARM_LABELS:
            refusal = "warm-up"
        return Decision(not refusal, risk, plain_risk, limit=limit, inflation=inflation, refusal=refusal)
