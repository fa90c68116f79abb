"""What other deltas would have served: as the policy would, and with the wrong answers that there would be."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.semantic.inspection.what_if import DELTAS, HOUR, KEPT, MINUTE, WhatIf
from cache.semantic.messages import WhatIfAccount, WhatIfPoint
from cache.semantic.policy.policy import Decision, JudgeError, Label
from tests.cache.semantic.policy.streams import Stream, near

SURE = JudgeError(1.0, 0.0)


class WatchedStream(Stream):
    """Counts what other deltas would have served of it, a request each second; `observe` serves nothing.

    `truth` is how many of a delta's hits are wrong, in all.
    """

    def __init__(self, delta: float, seed: int, observe: bool) -> None:
        super().__init__(delta, seed)
        self.what_if = WhatIf(delta, self.judge)
        self.observe = observe
        self.truth = dict.fromkeys({*DELTAS, delta}, 0)

    def ask(self, similarity: float, probability: float, entry: str | None = None) -> bool:
        right = self.chance.random() < probability
        evidence = near(similarity, entry=entry or str(self.requests))
        decision = self.policy.decide(evidence, compares=self.observe)
        was_served = decision.serve and not self.observe
        request = self.what_if.count_request(decision, 1.0, was_served, float(self.requests))
        for each in request.hits:
            self.truth[each] += not right
        self.requests += 1
        self.hits += decision.serve
        self.wrong += decision.serve and not right
        if decision.audit or not was_served:
            self.tell(Label.of(evidence, decision, right, "audit" if decision.serve else "miss"))
            request.judge(right)
        return decision.serve

    async def account(self, delta: float, steps: int = 1) -> WhatIfAccount:
        (account,) = await self.what_if.accounts((delta,), HOUR, self.requests // HOUR, steps)
        return account


@pytest.mark.parametrize("observe", [False, True])
async def test_the_own_delta_is_what_the_policy_did(observe: bool) -> None:
    """Hit by hit; in `observe`, where all hits are judged, each wrong answer is known."""
    stream = WatchedStream(0.01, 1, observe)
    stream.run(6000, 30.0)
    account = await stream.account(0.01)
    assert (account.requests, account.hits) == (stream.requests, stream.hits)
    assert stream.hits > 500
    assert stream.wrong / stream.requests <= account.wrong_upper
    if observe:
        assert (account.judged, account.found_wrong) == (stream.hits, stream.wrong)
        assert account.wrong == pytest.approx(stream.wrong / stream.requests)


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("delta", [0.005, 0.02])
async def test_another_delta_is_near_what_a_policy_of_it_does(delta: float, observe: bool) -> None:
    """Its share of hits, and wrong answers that are those of the answers which it would have served."""
    accounts = []
    for seed in range(3):
        stream = WatchedStream(0.01, seed, observe)
        stream.run(5000, 30.0)
        account = await stream.account(delta)
        assert stream.truth[delta] / stream.requests <= account.wrong_upper
        accounts.append((account, stream.truth[delta] / stream.requests))
    there = [Stream(delta, seed) for seed in range(3)]
    for each in there:
        each.run(5000, 30.0)
    hits = sum(account.hits for account, _ in accounts)
    assert hits == pytest.approx(sum(each.hits for each in there), rel=0.35)
    wrong = sum(account.wrong for account, _ in accounts)
    assert wrong == pytest.approx(sum(truth for _, truth in accounts), abs=1.5 * delta)


async def test_more_is_served_of_a_larger_delta() -> None:
    """And of one that was not counted before, from the requests that are remembered."""
    stream = WatchedStream(0.01, 1, observe=True)
    stream.run(5000, 30.0)
    hits = [(await stream.account(delta)).hits for delta in (0.002, 0.005, 0.01, 0.02, 0.1)]
    assert hits == sorted(hits)
    assert hits[0] < hits[-1]
    again = await stream.account(0.0100001)
    own = await stream.account(0.01)
    assert again.hits == pytest.approx(own.hits, abs=3)
    assert again.wrong == pytest.approx(own.wrong, abs=0.001)


async def test_only_the_last_requests_are_counted_anew() -> None:
    """Their first one says since when."""
    what_if = WhatIf(0.01, SURE)
    for second in range(KEPT + 5):
        what_if.count_request(
            Decision(False, 1.0, math.inf, refusal="none near"), 1.0, was_served=False, time=float(second)
        )
    (known,) = await what_if.accounts((0.01,), HOUR, 0, 1)
    (anew,) = await what_if.accounts((0.03,), HOUR, 0, 1)
    assert (known.requests, known.since) == (KEPT + 5, 0.0)
    assert (anew.requests, anew.since, anew.hits) == (KEPT, 5.0, 0)


async def test_a_judgement_counts_in_the_minute_of_its_request() -> None:
    """Also where it comes later. Shares are of all minutes up to one."""
    what_if = WhatIf(0.5, SURE)
    requests = [what_if.count_request(hit(0.001), 1.0, was_served=False, time=float(second)) for second in range(120)]
    for second, request in enumerate(requests):
        request.judge(second < 60)
    (account,) = await what_if.accounts((0.5,), MINUTE, 2, 4)
    points = account.points
    assert [(point.time, point.requests) for point in points] == [(-60, 0), (0, 60), (60, 60), (120, 0)]
    assert [point.wrong for point in points] == [None, 0.0, pytest.approx(0.5), pytest.approx(0.5)]
    assert points[2] == WhatIfPoint(time=60, requests=60, hits=60, wrong=account.wrong, wrong_upper=account.wrong_upper)
    (late,) = await what_if.accounts((0.5,), MINUTE, 1, 1)
    assert late.points == (points[2],)


def hit(risk: float, chance: float = 1.0, audit: bool = True) -> Decision:
    return Decision(True, risk, risk, audit=audit, audit_chance=chance, limit=0.5)


async def test_an_audit_stands_for_the_hits_that_were_not_drawn() -> None:
    """One wrong of ten audits, each drawn by a chance of a tenth, is a tenth of all hits."""
    what_if = WhatIf(0.5, SURE)
    for number in range(1000):
        audit = number % 10 == 0
        request = what_if.count_request(hit(0.001, 0.1, audit), 1.0, was_served=True, time=0.0)
        request.judge(number % 100 != 0)  # of those that nobody drew, it must not count
    (account,) = await what_if.accounts((0.5,), HOUR, 0, 1)
    assert account.judged <= 100
    assert account.wrong == pytest.approx(0.1, rel=0.3)
    assert account.wrong < account.wrong_upper <= account.hits / account.requests


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1), st.floats(0.25, 4), st.booleans(), st.sampled_from(["", "risk", "none near", "warm-up"])
        ),
        max_size=200,
    )
)
def test_shares_are_shares_whatever_comes(requests: list[tuple[float, float, bool, str]]) -> None:
    """Estimate and bound are from 0 to the hits, and a verdict that comes twice counts once."""
    what_if = WhatIf(0.01, SURE)
    for number, (risk, inflation, same, refusal) in enumerate(requests):
        decision = Decision(
            not refusal,
            min(1.0, risk * inflation),
            math.inf if refusal == "none near" else risk,
            audit=not refusal,
            audit_chance=0.0 if refusal else 0.5,
            inflation=inflation,
            refusal=refusal,  # type: ignore[arg-type]
        )
        request = what_if.count_request(decision, 1.0, was_served=not refusal, time=float(number))
        assert refusal not in ("none near", "warm-up") or not request.hits
        request.judge(same)
        request.judge(not same)
        assert request.same is same
        for tally in (tally for tallies in request.hits.values() for tally in tallies):
            share = tally.wrong_share(SURE)
            assert 0 <= share.estimate <= share.upper <= tally.hits / tally.requests + 1e-12


def test_a_request_without_neighbours_is_infinitely_risky() -> None:
    """So it is never a hit, whatever the correction."""
    stream = Stream(0.5, 0)
    stream.run(500, 80.0)
    decision = stream.policy.decide(None)
    assert decision.plain_risk == math.inf
    what_if = WhatIf(0.5, SURE)
    for second in range(200):
        assert what_if.count_request(hit(0.0), 1.0, was_served=True, time=float(second)).hits
        assert not what_if.count_request(decision, 1.0, was_served=False, time=float(second)).hits
