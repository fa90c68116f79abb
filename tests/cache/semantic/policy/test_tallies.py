"""The bound on wrong answers holds as often as it says, and is wide where little was audited."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.semantic.policy.policy import Decision, JudgeError, Label
from cache.semantic.policy.tallies import CONFIDENCE, WINDOW, Tallies, Tally, WrongShare
from tests.cache.semantic.policy.streams import dice

SURE = JudgeError(1.0, 0.0)


def verdict(same: bool, chance: float, source: str = "audit") -> Label:
    return Label("e", (), same, source, 0.01, chance)  # type: ignore[arg-type]


def hit(chance: float) -> Decision:
    return Decision(True, 0.01, 0.01, audit=False, audit_chance=chance)


MISS = Decision(False, 1.0)


def simulated(seed: int, judge: JudgeError, wrong: float, chances: tuple[float, ...]) -> tuple[WrongShare, float]:
    """What is said of a thousand requests, half of them hits, and the share that was wrong."""
    chance, tally, failed = dice(seed), Tally(), 0
    for turn in range(1000):
        if turn % 2:
            tally.count_request(MISS)
            continue
        audited = chances[turn // 2 % len(chances)]
        # The doubtful ones are audited more often.
        is_wrong = chance.random() < wrong * audited / (sum(chances) / len(chances))
        failed += is_wrong
        tally.count_request(hit(audited))
        if chance.random() < audited:
            says_same = chance.random() < (judge.false_same if is_wrong else judge.recall)
            tally.count_label(verdict(says_same, audited))
    return tally.wrong_share(judge), failed / 1000


@pytest.mark.parametrize("judge", [SURE, JudgeError(0.98, 0.01), JudgeError(0.9, 0.1)])
@pytest.mark.parametrize("wrong", [0.01, 0.1])
@pytest.mark.parametrize("chances", [(0.05,), (0.02, 0.04, 0.2)])
def test_the_bound_holds_as_often_as_it_says(judge: JudgeError, wrong: float, chances: tuple[float, ...]) -> None:
    """In 95 of 100 runs or more, and the estimate is right on average where nothing had to be cut off at zero."""
    runs = [simulated(seed, judge, wrong, chances) for seed in range(80)]
    held = sum(share.upper >= truth for share, truth in runs) / len(runs)
    # Three standard deviations of what 80 runs show below the confidence.
    assert held >= CONFIDENCE - 3 * (CONFIDENCE * (1 - CONFIDENCE) / len(runs)) ** 0.5
    if wrong == 0.1:
        estimates = sum(share.estimate for share, _ in runs) / len(runs)
        truths = sum(truth for _, truth in runs) / len(runs)
        assert estimates == pytest.approx(truths, rel=0.15)


def test_nothing_is_known_before_there_is_anything() -> None:
    """No request: everything may be wrong. Misses only: nothing is. Hits that nobody audits: all of them may be."""
    tally = Tally()
    assert tally.wrong_share(SURE) == (0.0, 1.0)
    tally.count_request(MISS)
    assert tally.wrong_share(SURE) == (0.0, 0.0)
    tally.count_request(hit(0.0))
    assert tally.wrong_share(SURE) == (0.0, 0.5)
    tally.count_request(hit(0.01))
    assert tally.wrong_share(SURE).upper == pytest.approx(2 / 3)


def test_audits_without_a_find_narrow_the_bound() -> None:
    """Three audited hits in a hundred thousand are nothing; after n audits about 3 / n of the hits may be wrong."""
    bounds = []
    for _ in range(3):
        tally = Tally()
        for turn in range(20_000):
            tally.count_request(hit(0.05))
            if turn % 20 == 0:
                tally.count_label(verdict(True, 0.05))
        bounds.append(tally.wrong_share(SURE).upper)
    assert bounds[0] == pytest.approx(3.0 / 1000, rel=0.05)


def test_hits_that_no_audit_could_find_count_like_the_others() -> None:
    """When there was no audit left to spend, the rest speaks for them."""
    watched, all_hits = Tally(), Tally()
    for turn in range(2000):
        for tally in (watched, all_hits):
            tally.count_request(hit(0.1))
            if turn % 10 == 0:
                tally.count_label(verdict(turn % 100 != 0, 0.1))
    for _ in range(2000):
        watched.count_request(MISS)
        all_hits.count_request(hit(0.0))
    assert all_hits.wrong_share(SURE).estimate == pytest.approx(2 * watched.wrong_share(SURE).estimate)
    assert all_hits.wrong_share(SURE).upper == pytest.approx(2 * watched.wrong_share(SURE).upper)


def test_audits_that_nobody_could_judge_are_not_taken_for_right() -> None:
    """A judge who says nothing of half of them leaves the estimate as it is, and the bound wider."""
    shares = []
    for answered in (1, 2):
        tally = Tally()
        for turn in range(4000):
            drawn = turn % 10 == 0
            tally.count_request(Decision(True, 0.01, 0.01, drawn, 0.1))
            if drawn and turn // 10 % answered == 0:
                tally.count_label(verdict(turn // 10 % 20 > 1, 0.1))
        shares.append(tally.wrong_share(SURE))
    assert shares[1].estimate == pytest.approx(shares[0].estimate)
    assert shares[1].upper > shares[0].upper


def test_a_complaint_is_no_estimate() -> None:
    """It is counted apart; an audit at 5 % that finds a wrong answer speaks for twenty."""
    tallies = {source: Tally() for source in ("user", "audit")}
    for source, tally in tallies.items():
        for _ in range(1000):
            tally.count_request(hit(0.05))
        tally.count_label(verdict(False, 0.05, source))
    assert (tallies["user"].complaints, tallies["user"].wrong_share(SURE).estimate) == (1, 0.0)
    assert tallies["audit"].wrong_share(SURE).estimate == pytest.approx(20 / 1000)


EVENTS = st.lists(
    st.one_of(
        st.builds(hit, st.floats(0.0, 1.0)),
        st.just(MISS),
        st.builds(verdict, st.booleans(), st.floats(0.01, 1.0), st.sampled_from(["audit", "user", "miss"])),
    ),
    max_size=60,
)


def counted(events: list[Decision | Label]) -> Tally:
    tally = Tally()
    for event in events:
        if isinstance(event, Decision):
            tally.count_request(event)
        else:
            tally.count_label(event)
    return tally


@settings(max_examples=60, deadline=None)
@given(EVENTS, EVENTS)
def test_tallies_of_two_processes_are_one_of_both(here: list[Decision | Label], there: list[Decision | Label]) -> None:
    """Sent over as bytes and added, they say what one that saw it all would say."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(counted(there)), type=Tally)
    both = counted(here) + sent
    for name in both.__struct_fields__:
        assert getattr(both, name) == pytest.approx(getattr(counted(here + there), name))


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.floats(0.6, 1.0), st.floats(0.0, 0.4))
def test_shares_are_shares(events: list[Decision | Label], recall: float, false_same: float) -> None:
    """Whatever happened, and whoever judged: 0 <= estimate <= bound <= 1."""
    share = counted(events).wrong_share(JudgeError(recall, false_same))
    assert 0.0 <= share.estimate <= share.upper <= 1.0


def test_the_recent_window_forgets() -> None:
    """A bad time is in the figures of all requests for ever, and in the recent ones for WINDOW requests."""
    answers = Tallies()

    def go_on(requests: int, same: bool) -> None:
        for turn in range(requests):
            answers.count_request(hit(0.1))
            if turn % 10 == 0:
                answers.count_label(verdict(same, 0.1))

    go_on(WINDOW, False)
    assert answers.recent.wrong_share(SURE).estimate == pytest.approx(1.0, rel=0.01)
    go_on(WINDOW, True)
    assert answers.recent.wrong_share(SURE).estimate == 0.0
    assert answers.recent.requests <= WINDOW
    assert answers.all.wrong_share(SURE).estimate == pytest.approx(0.5, rel=0.01)
