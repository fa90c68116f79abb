"""When an upstream is left alone: the breaker by itself, on a clock of the test."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.settings.upstreams import BreakerSettings
from gateway.upstreams.breaker import Admission, Breaker

SETTINGS = BreakerSettings(failures=3, open_for=5.0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def breaker_on(clock: Clock, settings: BreakerSettings = SETTINGS) -> Breaker:
    return Breaker(settings, clock)


def opened(clock: Clock, settings: BreakerSettings = SETTINGS) -> Breaker:
    breaker = breaker_on(clock, settings)
    for _ in range(settings.failures):
        breaker.failed()
    return breaker


def test_failures_in_a_row_open_it() -> None:
    """The third failure in a row opens it; an answer that ended well in between starts the count again."""
    breaker = breaker_on(Clock())
    for _ in range(10):
        breaker.failed()
        breaker.failed()
        breaker.began()
        breaker.completed()
    assert (breaker.state, breaker.admit()) == ("closed", Admission.ADMITTED)
    for _ in range(3):
        breaker.failed()
    assert (breaker.state, breaker.admit(), breaker.remaining) == ("open", Admission.REFUSED, 5.0)


def test_one_request_at_a_time_tries_an_upstream_that_was_left_alone() -> None:
    """After its time a single request is admitted; when that one says nothing of the upstream, another one is."""
    clock = Clock()
    breaker = opened(clock)
    clock.now = 5.0
    assert breaker.state == "half-open"
    assert [breaker.admit() for _ in range(3)] == [Admission.TRIAL, Admission.REFUSED, Admission.REFUSED]
    breaker.leave_trial()
    assert breaker.admit() is Admission.TRIAL


def test_each_trial_that_fails_doubles_the_time_up_to_a_minute() -> None:
    """5, 10, 20, 40, 60 and 60 seconds; an answer that ends well makes it five again."""
    clock = Clock()
    breaker = opened(clock)
    waits = []
    for _ in range(6):
        waits.append(breaker.remaining)
        clock.now += breaker.remaining
        assert breaker.admit() is Admission.TRIAL
        breaker.failed(is_trial=True)
    assert waits == [5, 10, 20, 40, 60, 60]

    clock.now += breaker.remaining
    breaker.admit()
    breaker.began()
    breaker.completed()
    for _ in range(3):
        breaker.failed()
    assert breaker.remaining == 5


def test_a_longer_time_of_the_settings_is_kept() -> None:
    """A time over a minute is not shortened."""
    clock = Clock()
    breaker = opened(clock, BreakerSettings(failures=1, open_for=300.0))
    clock.now = 300.0
    breaker.admit()
    breaker.failed(is_trial=True)
    assert breaker.remaining == 300


def test_a_trial_that_breaks_off_opens_it_again_for_longer() -> None:
    """An answer that begins closes it, and one failure before an answer has ended opens it for twice the time."""
    clock = Clock()
    breaker = opened(clock)
    clock.now = 5.0
    breaker.admit()
    breaker.began()
    assert breaker.state == "closed"
    breaker.failed()
    assert (breaker.state, breaker.remaining) == ("open", 10.0)


def test_failures_of_requests_sent_before_it_opened_change_nothing() -> None:
    """Neither while it is open nor while another request tries the upstream."""
    clock = Clock()
    breaker = opened(clock)
    breaker.failed()
    assert breaker.remaining == 5
    clock.now = 5.0
    assert breaker.admit() is Admission.TRIAL
    breaker.failed()
    assert breaker.admit() is Admission.REFUSED, "the trial is still under way"
    assert breaker.remaining == 0
    breaker.began()
    assert breaker.state == "closed"


def test_a_health_check_closes_it_only_after_lost_connections() -> None:
    """An upstream that is well by its health check may still fail at requests."""
    for unreachable in (False, True):
        breaker = breaker_on(Clock())
        for _ in range(3):
            breaker.failed(unreachable=unreachable)
        breaker.checked()
        assert breaker.state == ("closed" if unreachable else "open")


OPERATIONS = st.lists(
    st.one_of(
        st.sampled_from(["admit", "fail", "begin", "complete", "leave", "check"]),
        st.floats(min_value=0.0, max_value=80.0, allow_nan=False),
    ),
    max_size=60,
)


@given(operations=OPERATIONS, failures=st.integers(1, 4), open_for=st.sampled_from([1.0, 5.0, 90.0]))
def test_it_never_admits_more_than_one_trial(operations: list[str | float], failures: int, open_for: float) -> None:
    """Whatever happens: nothing is admitted while it is open, at most one trial after that, and it ends."""
    clock = Clock()
    breaker = breaker_on(clock, BreakerSettings(failures=failures, open_for=open_for))
    under_way: list[bool] = []  # whether each is a trial
    row = 0
    for operation in operations:
        state = breaker.state
        if isinstance(operation, float):
            clock.now += operation
        elif operation == "admit":
            admission = breaker.admit()
            has_trial = any(under_way)
            allowed = {
                "closed": {Admission.ADMITTED},
                "open": {Admission.REFUSED},
                "half-open": {Admission.REFUSED} if has_trial else {Admission.TRIAL},
            }
            assert admission in allowed[state]
            if admission is not Admission.REFUSED:
                under_way.append(admission is Admission.TRIAL)
        elif operation == "check":
            breaker.checked()
            assert state != "closed" or breaker.state == "closed"
        elif under_way:
            is_trial = under_way.pop(0)
            if operation == "fail":
                breaker.failed(is_trial=is_trial)
                row += 1
                if is_trial and state == "half-open":
                    assert breaker.state == "open"
                assert breaker.state == "open" or state == "half-open" or row < failures
            elif operation == "leave" and is_trial:
                breaker.leave_trial()
            elif operation != "leave":
                breaker.began()
                assert breaker.state == "closed"
                under_way = [False] * len(under_way)  # it has closed: no other one is a trial any more
                if operation == "complete":
                    breaker.completed()
                    row = 0
                else:
                    row = failures - 1 if state != "closed" else row
        assert 0 <= breaker.remaining <= max(60.0, open_for) + 1e-6  # of rounding
    clock.now += max(60.0, open_for) + 1
    breaker.leave_trial()
    assert breaker.admit() is not Admission.REFUSED
