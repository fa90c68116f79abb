"""Streams of requests whose truth is known, for the tests of policies."""

import random

from cache.semantic.policy.budget import BudgetPolicy
from cache.semantic.policy.policy import Decision, Evidence, JudgeError, Label
from cache.semantic.policy.posterior import evidence_of


def dice(seed: int = 0) -> random.Random:
    return random.Random(seed)  # noqa: S311 - reproducible


def near(similarity: float, rival: float = 0.5, entry: str = "near") -> Evidence:
    return evidence_of([(f"answer of {entry}", similarity), ("other", rival)])


def risk_of(decision: Decision) -> float:
    assert decision.risk is not None
    return decision.risk


class Stream:
    """Requests with one neighbour each, whose answer is right with a probability that is given for each.

    `judge` is what the policy believes of the judge, `truly` what he is; `unsure` is how often he says nothing.
    `complaints` is how often who got a wrong answer says so.
    """

    def __init__(
        self,
        delta: float,
        seed: int,
        judge: JudgeError | None = None,
        truly: JudgeError | None = None,
        unsure: float = 0.0,
        complaints: float = 0.0,
        audit_share: float = 0.02,
    ) -> None:
        self.judge = judge or JudgeError(1.0, 0.0)
        self.truly = truly or self.judge
        self.unsure = unsure
        self.complaints = complaints
        self.policy = BudgetPolicy(delta, self.judge, dice(seed), audit_share)
        self.chance = dice(seed + 1)
        self.requests = self.hits = self.wrong = self.audits = 0
        self.labels: list[Label] = []

    def ask(self, similarity: float, probability: float, entry: str | None = None) -> bool:
        """Whether it was a hit. Unless said otherwise, each request is near another entry."""
        right = self.chance.random() < probability
        said = self.chance.random() < (self.truly.recall if right else self.truly.false_same)
        silent = self.chance.random() < self.unsure
        evidence = near(similarity, entry=entry or str(self.requests))
        decision = self.policy.decide(evidence)
        self.requests += 1
        if decision.serve:
            self.hits += 1
            self.wrong += not right
            self.audits += decision.audit
            if decision.audit and not silent:
                self.tell(Label.of(evidence, decision, said, "audit"))
            if not right and self.chance.random() < self.complaints:
                self.tell(Label.of(evidence, decision, False, "user"))
        elif not silent:
            self.tell(Label.of(evidence, decision, said, "miss"))
        return decision.serve

    def tell(self, label: Label) -> None:
        self.labels.append(label)
        self.policy.learn(label)
        if label.source != "miss":
            self.policy.settle(label)

    def run(self, requests: int, steepness: float, boundary: float = 0.8) -> None:
        """Similarities are spread evenly over .5 to 1, and right from about `boundary` on."""
        for _ in range(requests):
            similarity = self.chance.uniform(0.5, 1.0)
            self.ask(similarity, right_at(similarity, steepness, boundary))


def right_at(similarity: float, steepness: float, boundary: float = 0.8) -> float:
    return float(1 / (1 + 2.718281828459045 ** (-steepness * (similarity - boundary))))
