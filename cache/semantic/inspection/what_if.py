"""What the budget would serve with another delta, and how much of that would be wrong, counted beside the policy.

Each delta has a ledger of its own over the same requests and the same risks. There is no second posterior: what is
known of a question does not depend on delta. A judgement says whether an answer is right, so it counts for every delta
that would have served it. Answers that were not served are judged as misses, nearly all of them, and stand for
themselves; those that were served are judged by audits, each of which stands for the hits that were not drawn.
"""

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from cache.semantic.messages import Step, WhatIfAccount, WhatIfPoint
from cache.semantic.policy.bound import Tally
from cache.semantic.policy.budget import max_risk
from cache.semantic.policy.label import Label
from cache.semantic.policy.ledger import Ledger
from cache.semantic.policy.policy import Decision
from cache.semantic.policy.posterior import JudgeError

DELTAS = (0.005, 0.01, 0.02)
"""Counted in each process, beside the policy's own."""
KEPT = 10_000
"""Requests that are remembered to count them for any other delta."""
MINUTE: Step = 60
HOUR: Step = 3600
_STEPS_KEPT: dict[Step, int] = {MINUTE: 180, HOUR: 744}
_AT_ONCE = 20
_MISS = Decision(False, 1.0)


@dataclass(slots=True, eq=False)
class DecidedRequest:
    """A request as every delta counts it, at `time` in Unix seconds.

    `was_served` says whether its answer was, and `same` is its judgement, None before it is known. `hits` are the
    accounts that would have served it.
    """

    decision: Decision
    max_risk: float
    was_served: bool
    time: float
    same: bool | None = None
    hits: "tuple[Account, ...]" = ()

    @property
    def chance(self) -> float:
        """The probability with which its answer is judged; each one that was not served is."""
        return self.decision.audit_chance if self.was_served else 1.0

    @property
    def is_drawn(self) -> bool:
        """Whether it is judged."""
        return self.decision.audit or not self.was_served

    @property
    def plain_risk(self) -> float:
        """Infinite where nothing could be served."""
        return math.inf if self.decision.refusal == "none near" else self.decision.plain_risk

    def judge(self, same: bool) -> None:
        """Count the judgement of its answer. One that nobody has drawn counts nowhere: it is no sample."""
        if self.same is None and self.is_drawn:
            self.same = same
            for account in self.hits:
                account.judge(self)


class Account:
    """The hits of one delta: since its first request, at `since`, and by number since 1970 of each minute and hour."""

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self.since: float | None = None
        self.all = Tally()
        self.steps: dict[Step, dict[int, Tally]] = {step: {} for step in _STEPS_KEPT}
        self._ledger = Ledger(delta)
        self._max_risk = max_risk(delta)

    def decide(self, request: DecidedRequest) -> bool:
        """Whether the request would have been a hit; each one is decided once."""
        decision, plain = request.decision, request.plain_risk
        self.since = request.time if self.since is None else self.since
        self._ledger.request(plain, decision.inflation)
        risk = min(1.0, decision.inflation * plain)
        is_hit = decision.refusal != "warm-up" and risk <= min(self._ledger.limit, self._max_risk, request.max_risk)
        if is_hit:
            self._ledger.spend(risk, plain)
        for step, steps in self.steps.items():
            steps.setdefault(int(request.time) // step, Tally())
            if len(steps) > _STEPS_KEPT[step]:
                del steps[next(iter(steps))]
        counted = Decision(True, None, audit=request.is_drawn, audit_chance=request.chance) if is_hit else _MISS
        for tally in self._tallies_of(request):
            tally.decided(counted)
        return is_hit

    def judge(self, request: DecidedRequest) -> None:
        """Count the judgement of a hit, in the time of the request."""
        label = Label("", (), bool(request.same), "audit", chance=request.chance)
        for tally in self._tallies_of(request):
            tally.judged(label)

    def _tallies_of(self, request: DecidedRequest) -> list[Tally]:
        of_steps = (steps.get(int(request.time) // step) for step, steps in self.steps.items())
        return [self.all, *(tally for tally in of_steps if tally is not None)]


class WhatIf:
    """Accounts of several deltas over the requests of one process. It starts empty, as the policy's own ledger does.

    Args:
        delta: the policy's own.
        judge: how often judgements are wrong.
    """

    def __init__(self, delta: float, judge: JudgeError) -> None:
        self.delta = delta
        self._judge = judge
        self._accounts = {each: Account(each) for each in sorted({*DELTAS, delta})}
        self._kept: deque[DecidedRequest] = deque(maxlen=KEPT)

    def decided(self, decision: Decision, max_risk: float, was_served: bool, time: float) -> DecidedRequest:
        """Count a request that the policy has decided."""
        request = DecidedRequest(decision, max_risk, was_served, time)
        request.hits = tuple(account for account in self._accounts.values() if account.decide(request))
        self._kept.append(request)
        return request

    async def accounts(self, deltas: Sequence[float], step: Step, last: int, steps: int) -> tuple[WhatIfAccount, ...]:
        """What each of `deltas` would have served, the standard ones and the policy's own where none is named, with the
        minutes or hours up to number `last` since 1970. One that is not counted all along is counted of the last KEPT
        requests.
        """
        told = []
        for delta in deltas or self._accounts:
            account = self._accounts.get(delta) or await self._recounted(delta)
            counted, wrong = account.all, account.all.wrong_share(self._judge)
            told.append(
                WhatIfAccount(
                    delta=delta,
                    since=account.since,
                    requests=counted.requests,
                    hits=counted.hits,
                    judged=counted.audits,
                    found_wrong=counted.found_wrong,
                    wrong=wrong.estimate,
                    wrong_upper=wrong.upper,
                    points=await self._points(account.steps[step], step, range(last - steps + 1, last + 1)),
                )
            )
        return tuple(told)

    async def _recounted(self, delta: float) -> Account:
        account = Account(delta)
        for number, request in enumerate(list(self._kept)):
            if account.decide(request) and request.same is not None:
                account.judge(request)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return account

    async def _points(self, begun: dict[int, Tally], step: Step, numbers: range) -> tuple[WhatIfPoint, ...]:
        """Those of `numbers`. The share of wrong answers is of all steps up to each."""
        sums, points = Tally(), []
        for place, number in enumerate(sorted(begun.keys() | set(numbers))):
            tally = begun.get(number, Tally())
            sums.add(tally)
            if number in numbers:
                share = sums.wrong_share(self._judge) if sums.requests else None
                points.append(
                    WhatIfPoint(
                        time=number * step,
                        requests=tally.requests,
                        hits=tally.hits,
                        wrong=share and share.estimate,
                        wrong_upper=share and share.upper,
                    )
                )
            if place % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return tuple(points)
