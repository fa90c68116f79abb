"""The budget of retries."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.budget import RetryBudget


def test_a_fifth_of_the_requests_may_be_sent_again() -> None:
    """Of a thousand requests in a second two hundred may be sent again, and of none still ten."""
    for requests, allowed in ((1000, 200), (0, 10), (30, 10), (51, 11)):
        budget = RetryBudget()
        for _ in range(requests):
            budget.count(5.0)
        assert sum(budget.take(5.5, 0.2) for _ in range(1000)) == allowed


def test_requests_count_for_ten_seconds() -> None:
    """What was taken is there again ten seconds later."""
    budget = RetryBudget()
    assert [budget.take(0.0, 0.2) for _ in range(11)] == [True] * 10 + [False]
    assert not budget.take(9.9, 0.2)
    assert [budget.take(10.0, 0.2) for _ in range(11)] == [True] * 10 + [False]


def test_what_is_given_back_can_be_taken_again() -> None:
    """A retry that has been answered leaves its place to another one, and makes none where its second is over."""
    budget = RetryBudget()
    for _ in range(10):
        assert budget.take(0.0, 0.2)
    budget.give_back(0.0)
    assert [budget.take(9.0, 0.2) for _ in range(2)] == [True, False]
    assert [budget.take(10.0, 0.2) for _ in range(10)] == [True] * 9 + [False]
    budget.give_back(0.0)
    assert not budget.take(10.5, 0.2)


def test_the_least_can_be_less() -> None:
    """A budget of hedges allows one in ten seconds whatever the share."""
    budget = RetryBudget(least=1)
    assert [budget.take(0.0, 0.05) for _ in range(3)] == [True, False, False]


STEPS = st.lists(st.tuples(st.floats(0, 4), st.booleans()), max_size=200)


@given(steps=STEPS, share=st.floats(0, 1), least=st.integers(0, 12))
def test_retries_are_never_more_than_their_share(steps: list[tuple[float, bool]], share: float, least: int) -> None:
    """At every moment the retries of the last ten seconds are at most the share of their requests, or the least."""
    budget, now = RetryBudget(least), 100.0
    requests: list[float] = []
    retries: list[float] = []
    for pause, is_request in steps:
        now += pause
        recent = [number for number in requests if int(now) - int(number) < 10]
        sent = [number for number in retries if int(now) - int(number) < 10]
        if is_request:
            budget.count(now)
            requests.append(now)
        else:
            allowed = len(sent) < max(least, share * len(recent))
            assert budget.take(now, share) == allowed
            if allowed:
                retries.append(now)
