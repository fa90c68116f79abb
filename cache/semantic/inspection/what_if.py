"""What the budget would serve with another delta, and how much of that would be wrong, counted beside the policy.

Each delta has a ledger of its own over the same requests and the same risks. There is no second posterior: what is
known of a question does not depend on delta. A judgement says whether an answer is right, so it counts for every delta
that would have served it. Answers that were not served are judged as misses, nearly all of them; those that were served
are judged by audits, each of which stands for the hits that were not drawn.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Sequence

from cache.semantic.messages import Step, WhatIfAccount, WhatIfPoint
from cache.semantic.policy.bound import Tally, WrongShare
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
_RECOUNTED_AT_ONCE = 20
_ADDED_AT_ONCE = 50
_MISS = Decision(False, 1.0)


class DecidedRequest:
    """A request as every delta counts it, at `time` in Unix seconds.

    `was_served` says whether its answer was; `chance` is the probability with which that is judged, 1 for one that was
    not, and `is_drawn` whether it is. `same` is the judgement, None before it is known. `hits` are the accounts that
    would have served it.
    """

    __slots__ = ("chance", "decision", "hits", "is_drawn", "max_risk", "same", "time", "was_served")

    def __init__(self, decision: Decision, max_risk: float, was_served: bool, time: float) -> None:
        self.decision = decision
        self.max_risk = max_risk
        self.was_served = was_served
        self.chance = decision.audit_chance if was_served else 1.0
        self.is_drawn = decision.audit if was_served else True
        self.time = time
        self.same: bool | None = None
        self.hits: tuple[Account, ...] = ()

    @property
    def plain_risk(self) -> float:
        """Infinite where nothing could be served."""
        return math.inf if self.decision.refusal == "none near" else self.decision.plain_risk


class Counts:
    """What one delta would have served of some requests. Hits that were served and those that were not are separate,
    since different shares of them are judged.
    """

    def __init__(self) -> None:
        self._served, self._missed = Tally(), Tally()

    @property
    def requests(self) -> int:
        return self._served.requests

    @property
    def hits(self) -> int:
        return self._served.hits + self._missed.hits

    @property
    def judged(self) -> int:
        """Hits whose answer was judged."""
        return self._served.audits + self._missed.audits

    @property
    def found_wrong(self) -> int:
        """Those of them that were called different."""
        return self._served.found_wrong + self._missed.found_wrong

    def decided(self, request: DecidedRequest, is_hit: bool) -> None:
        hit = Decision(True, None, audit=request.is_drawn, audit_chance=request.chance)
        self._served.decided(hit if is_hit and request.was_served else _MISS)
        self._missed.decided(hit if is_hit and not request.was_served else _MISS)

    def judged_hit(self, request: DecidedRequest, same: bool) -> None:
        tally = self._served if request.was_served else self._missed
        tally.judged(Label("", 1.0, (), same, "audit", chance=request.chance))

    def add(self, other: "Counts") -> None:
        """Count what `other` has counted as well."""
        self._served.add(other._served)
        self._missed.add(other._missed)

    def wrong_share(self, judge: JudgeError) -> WrongShare:
        """Wrong answers per request, as `Tally.wrong_share`. The bound of the sum is that of Zou and Donner (Statistics
        in Medicine 27, 2008): the distances of both bounds from their estimates add up as independent errors do.
        """
        if not self.requests:
            return WrongShare(0.0, 1.0)
        shares = [tally.wrong_share(judge) for tally in (self._served, self._missed)]
        estimate = sum(share.estimate for share in shares)
        upper = estimate + math.hypot(*(share.upper - share.estimate for share in shares))
        return WrongShare(estimate, min(upper, self.hits / self.requests))


class Account:
    """The hits of one delta: since its first request, at `since`, and of each minute and hour that is kept."""

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self.since: float | None = None
        self.all = Counts()
        self._ledger = Ledger(delta)
        self._max_risk = max_risk(delta)
        self._steps: dict[Step, OrderedDict[int, Counts]] = {step: OrderedDict() for step in _STEPS_KEPT}

    def decide(self, request: DecidedRequest) -> bool:
        """Whether the request would have been a hit; each one is decided once."""
        decision, plain = request.decision, request.plain_risk
        self.since = request.time if self.since is None else self.since
        self._ledger.request(plain, decision.inflation)
        risk = min(1.0, decision.inflation * plain)
        is_hit = decision.refusal != "warm-up" and risk <= min(self._ledger.limit, self._max_risk, request.max_risk)
        if is_hit:
            self._ledger.spend(risk, plain)
        for counts in (self.all, *(self._begun(step, request.time) for step in _STEPS_KEPT)):
            counts.decided(request, is_hit)
        return is_hit

    def judge(self, request: DecidedRequest, same: bool) -> None:
        """Count the judgement of a hit, in the time of the request."""
        self.all.judged_hit(request, same)
        for step, steps in self._steps.items():
            if (counts := steps.get(int(request.time) // step)) is not None:
                counts.judged_hit(request, same)

    def steps(self, step: Step) -> list[tuple[int, Counts]]:
        """The minutes or hours that had requests, by their numbers since 1970, the oldest first."""
        return sorted(self._steps[step].items())

    def _begun(self, step: Step, time: float) -> Counts:
        steps, number = self._steps[step], int(time) // step
        if number not in steps:
            steps[number] = Counts()
            if len(steps) > _STEPS_KEPT[step]:
                steps.popitem(last=False)
        return steps[number]


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

    def judged(self, request: DecidedRequest, same: bool) -> None:
        """Count the judgement of a request's answer. One that nobody has drawn counts nowhere: it is no sample."""
        if request.same is None and request.is_drawn:
            request.same = same
            for account in request.hits:
                account.judge(request, same)

    async def accounts(self, deltas: Sequence[float], step: Step, last: int, steps: int) -> tuple[WhatIfAccount, ...]:
        """What each of `deltas` would have served, the standard ones and the policy's own where none is named, with the
        minutes or hours up to number `last` since 1970. One that is not counted all along is counted of the last KEPT
        requests.
        """
        accounts = [await self._account(delta) for delta in deltas or self._accounts]
        numbers = range(last - steps + 1, last + 1)
        return tuple([await self._told(account, step, numbers) for account in accounts])

    async def _account(self, delta: float) -> Account:
        if delta in self._accounts:
            return self._accounts[delta]
        account = Account(delta)
        for number, request in enumerate(list(self._kept)):
            if number % _RECOUNTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            if account.decide(request) and request.same is not None:
                account.judge(request, request.same)
        return account

    async def _told(self, account: Account, step: Step, numbers: Sequence[int]) -> WhatIfAccount:
        counts, wrong = account.all, account.all.wrong_share(self._judge)
        return WhatIfAccount(
            delta=account.delta,
            since=account.since,
            requests=counts.requests,
            hits=counts.hits,
            judged=counts.judged,
            found_wrong=counts.found_wrong,
            wrong=wrong.estimate,
            wrong_upper=wrong.upper,
            points=await self._points(account, step, numbers),
        )

    async def _points(self, account: Account, step: Step, numbers: Sequence[int]) -> tuple[WhatIfPoint, ...]:
        begun = account.steps(step)
        sums, share, points, place = Counts(), None, [], 0
        for number in numbers:
            of_step = None
            while place < len(begun) and begun[place][0] <= number:
                of_step = begun[place][1] if begun[place][0] == number else None
                sums.add(begun[place][1])
                share = None
                place += 1
                if place % _ADDED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            if sums.requests and share is None:
                share = sums.wrong_share(self._judge)
            points.append(
                WhatIfPoint(
                    time=number * step,
                    requests=of_step.requests if of_step else 0,
                    hits=of_step.hits if of_step else 0,
                    wrong=share and share.estimate,
                    wrong_upper=share and share.upper,
                )
            )
        return tuple(points)
