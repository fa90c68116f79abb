"""What the budget would serve with another delta, and how much of that would be wrong, counted beside the policy.

Each delta has a ledger of its own over the same requests and the same risks. There is no second posterior: what is
known of a question does not depend on delta. A judgement says whether an answer is right, so it counts for every delta
that would have served it. Answers that were not served are judged as misses, nearly all of them, and stand for
themselves; those that were served are judged by audits, each of which stands for the hits that were not drawn.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from cache.semantic.messages import Step, WhatIfAccount, WhatIfPoint
from cache.semantic.policy.ledger import Ledger
from cache.semantic.policy.policy import Decision, JudgeError
from cache.semantic.policy.tallies import Tally

DELTAS = (0.005, 0.01, 0.02)
"""Counted in each process, beside the policy's own."""
KEPT = 10_000
"""Requests that are remembered to count them for any other delta."""
MINUTE: Step = 60
HOUR: Step = 3600
_STEPS_KEPT: dict[Step, int] = {MINUTE: 180, HOUR: 744}
_AT_ONCE = 20


@dataclass(slots=True, eq=False)
class CountedRequest:
    """A request as every delta counts it, at `time` in Unix seconds.

    The `decision` is the policy's, with an audit that was sure to be drawn for an answer that was not served: each such
    one is judged. `same` is the judgement, None before it is known. `hits` are, by delta that would have served it, the
    tallies that it is counted in.
    """

    decision: Decision
    max_risk: float
    time: float
    same: bool | None = None
    hits: dict[float, list[Tally]] = field(default_factory=dict)

    def judge(self, same: bool) -> None:
        """Count the judgement of its answer. One that nobody has drawn counts nowhere: it is no sample."""
        if self.same is None and self.decision.audit:
            self.same = same
            for tally in chain.from_iterable(self.hits.values()):
                tally.count_audit(same, self.decision.audit_chance)


class Account:
    """The hits of one delta: since its first request, at `since`, and by number since 1970 of each minute and hour."""

    def __init__(self, delta: float) -> None:
        self.since: float | None = None
        self.all = Tally()
        self.steps: dict[Step, dict[int, Tally]] = {step: {} for step in _STEPS_KEPT}
        self._ledger = Ledger(delta)

    def count(self, request: CountedRequest) -> list[Tally]:
        """Count a request, once, and return the tallies with it if it would have been a hit, else none."""
        decision = request.decision
        self.since = request.time if self.since is None else self.since
        self._ledger.request(decision.plain_risk, decision.inflation)
        risk = min(1.0, decision.inflation * decision.plain_risk)
        is_hit = decision.refusal != "warm-up" and risk <= min(self._ledger.limit, request.max_risk)
        if is_hit:
            self._ledger.spend(risk, decision.plain_risk)
        tallies = [self.all]
        for step, steps in self.steps.items():
            tallies.append(steps.setdefault(int(request.time) // step, Tally()))
            if len(steps) > _STEPS_KEPT[step]:
                del steps[next(iter(steps))]
        counted = replace(decision, serve=is_hit)
        for tally in tallies:
            tally.count_request(counted)
        return tallies if is_hit else []


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
        self._kept: deque[CountedRequest] = deque(maxlen=KEPT)

    def count_request(self, decision: Decision, max_risk: float, was_served: bool, time: float) -> CountedRequest:
        """Count a request that the policy has decided."""
        if not was_served:
            decision = replace(decision, audit=True, audit_chance=1.0)
        request = CountedRequest(decision, max_risk, time)
        for delta, account in self._accounts.items():
            if tallies := account.count(request):
                request.hits[delta] = tallies
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
            counted = account.all
            wrong, wrong_upper = counted.wrong_share(self._judge)
            told.append(
                WhatIfAccount(
                    delta=delta,
                    since=account.since,
                    requests=counted.requests,
                    hits=counted.hits,
                    judged=counted.audits,
                    found_wrong=counted.found_wrong,
                    wrong=wrong,
                    wrong_upper=wrong_upper,
                    points=await self._points(account.steps[step], step, range(last - steps + 1, last + 1)),
                )
            )
        return tuple(told)

    async def _recounted(self, delta: float) -> Account:
        account = Account(delta)
        for number, request in enumerate(list(self._kept)):
            for tally in account.count(request):
                if request.same is not None:
                    tally.count_audit(request.same, request.decision.audit_chance)
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return account

    async def _points(self, begun: dict[int, Tally], step: Step, numbers: range) -> tuple[WhatIfPoint, ...]:
        """Those of `numbers`. The share of wrong answers is of all steps up to each."""
        sums, points = Tally(), []
        for place, number in enumerate(sorted(begun.keys() | set(numbers))):
            tally = begun.get(number, Tally())
            sums += tally
            if number in numbers:
                wrong, upper = sums.wrong_share(self._judge) if sums.requests else (None, None)
                points.append(
                    WhatIfPoint(
                        time=number * step, requests=tally.requests, hits=tally.hits, wrong=wrong, wrong_upper=upper
                    )
                )
            if place % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return tuple(points)
