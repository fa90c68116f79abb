"""A budget of wrong answers: the operator sets their share of all requests, and the policy spends no more."""

import math
import random
from typing import Annotated

import msgspec

from cache.semantic.policy.audits import AuditLoad
from cache.semantic.policy.bound import WrongAnswers
from cache.semantic.policy.calibration import Calibration, CalibrationState
from cache.semantic.policy.evidence import evidence_of
from cache.semantic.policy.label import Label
from cache.semantic.policy.ledger import Ledger
from cache.semantic.policy.policy import Assessment, Decision, Evidence, Neighbourhood, Refusal, RiskClassFigures
from cache.semantic.policy.posterior import JudgeError, Posterior, PosteriorState, vector
from cache.semantic.policy.reliability import BOUNDS, Reliability, RiskClass
from cache.semantic.policy.state import freeze, thaw
from cache.semantic.policy.wrong_answer_risk import MAX_PENALTIES, Penalty, WrongAnswerRisk

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


class BudgetPolicy:
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
        self.posterior = Posterior(judge)
        self._wrong_answer_risk = WrongAnswerRisk()
        self._judge = judge
        self._reliability = Reliability()
        self.wrong_answers = WrongAnswers()
        self._ledger = Ledger(delta)
        self._load = AuditLoad(audit_share, chance)
        self._calibration = Calibration(judge, delta, self._max_risk)

    @property
    def inflation(self) -> float:
        """How many times as many hits are wrong as the posterior says, by judgements or, if more, by complaints."""
        return max(self._calibration.ratio, self._ledger.complained)

    def weigh(self, neighbourhood: Neighbourhood) -> Evidence:
        return evidence_of(neighbourhood)

    def decide(self, evidence: Evidence | None, max_risk: float = 1.0, compares: bool = False) -> Decision:
        decision = self._decide(evidence, max_risk, compares)
        self.wrong_answers.decided(decision)
        return decision

    def assess(self, evidence: Evidence, max_risk: float = 1.0) -> Assessment:
        risk = min(1.0, self.inflation * self._plain_risk(evidence))
        limit = min(self._ledger.limit, self._max_risk, max_risk)
        if self.posterior.labels < WARM_LABELS:
            reason = f"it has learned from {self.posterior.labels} of the {WARM_LABELS} answers that it needs"
            return Assessment(False, risk, reason)
        return Assessment(
            risk <= limit,
            risk,
            f"the risk {risk:.4f} is {'within' if risk <= limit else 'above'} the limit {limit:.4f}",
        )

    def learn(self, label: Label) -> None:
        features = vector(label.features)
        judge = None if label.judge is None else JudgeError(*label.judge)
        if label.same or label.source != "miss":
            wrong = 1.0 if judge is None or label.source == "user" else judge.really_wrong(label.risk)
            self._wrong_answer_risk.found(label.answer or label.entry, label.same, wrong)
        self._calibration.count(label)
        self.posterior.learn(features, label.same, label.chance if label.source == "user" else 1.0, judge)
        self._reliability.count(label)

    def settle(self, label: Label) -> None:
        if label.judge is not None and label.source == "audit":
            self._judge = self._judge.toward(JudgeError(*label.judge), _NEWEST_ERROR)
        self.wrong_answers.judged(label)
        if label.source == "user" and not label.same:
            self._ledger.complain()

    def snapshot(self) -> bytes:
        return freeze(
            _KIND,
            _State(
                self.posterior.state(),
                self._calibration.state(),
                self._wrong_answer_risk.state(),
                self._reliability.state(),
            ),
        )

    def restore(self, state: bytes) -> None:
        learned = thaw(state, _KIND, _State)
        self.posterior.restore(learned.posterior)
        self._wrong_answer_risk.restore(learned.penalties)
        self._reliability.restore(learned.reliability)
        self._calibration.restore(learned.calibration)

    def figures(self) -> dict[str, float]:
        """Wrong answers are per request and as audits show; `upper` holds with 95 % confidence."""
        ever, recent = self.wrong_answers.all, self.wrong_answers.recent
        return {
            "delta": self.delta,
            "labels": self.posterior.labels,
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
        return self._reliability.figures(self._judge)

    def _decide(self, evidence: Evidence | None, max_risk: float, compares: bool) -> Decision:
        self._load.request()
        inflation = self.inflation
        if evidence is None:
            self._ledger.request(math.inf, inflation)
            return Decision(False, 1.0, inflation=inflation, refusal="none near")
        plain = self._plain_risk(evidence)
        self._ledger.request(plain, inflation)
        risk = min(1.0, inflation * plain)
        limit = min(self._ledger.limit, self._max_risk)
        if self.posterior.labels < WARM_LABELS:
            return Decision(False, risk, plain, limit=limit, inflation=inflation, refusal="warm-up")
        if risk > min(limit, max_risk):
            refusal: Refusal = "risk" if risk > limit else "max-risk"
            return Decision(False, risk, plain, limit=limit, inflation=inflation, refusal=refusal)
        self._ledger.spend(risk, plain)
        chance = 1.0 if compares else self._load.chance_of(plain)
        return Decision(True, risk, plain, compares or self._load.draw(chance), chance, limit, inflation)

    def _plain_risk(self, evidence: Evidence) -> float:
        """Before the correction by audits."""
        return max(
            self.posterior.wrong(evidence.features, DEVIATIONS), self._wrong_answer_risk.risk_of(evidence.answer)
        )


class _State(msgspec.Struct, frozen=True, array_like=True):
    """What was learned."""

    posterior: PosteriorState
    calibration: CalibrationState
    penalties: Annotated[tuple[Penalty, ...], msgspec.Meta(max_length=MAX_PENALTIES)]
    reliability: tuple[RiskClass, ...] = ()

    def __post_init__(self) -> None:
        if len(self.reliability) not in (0, len(BOUNDS)):
            raise ValueError(f"reliability has {len(self.reliability)} classes of risk, and not {len(BOUNDS)}")
