"""Clocks of other machines, from what they say and how long they took to say it."""

import pytest

from gateway.commands.doctor import clock


@pytest.mark.parametrize(
    ("theirs", "began", "ended", "status", "words"),
    [
        (1000.9, 1000.0, 1000.1, "ok", "within 1 s"),
        (1001.0, 1000.0, 1003.0, "ok", "within 1 s"),  # anywhere in the three seconds that it took
        (1002.5, 1000.0, 1000.1, "warning", "2.4 s ahead of"),
        (997.0, 1000.0, 1000.1, "warning", "3.0 s behind"),
    ],
)
def test_the_time_of_redis_is_compared(theirs: float, began: float, ended: float, status: str, words: str) -> None:
    """TIME has microseconds; the time that the answer took is not held against it."""
    found = clock.of_redis(int(theirs), round(theirs % 1 * 1e6), began, ended)
    assert (found.status, words in found.summary) == (status, True), found.summary


@pytest.mark.parametrize(
    ("second", "began", "status"),
    [(40, 41.9, "ok"), (40, 42.1, "warning"), (40, 39.0, "ok"), (40, 38.9, "warning")],
)
def test_a_date_has_whole_seconds(second: int, began: float, status: str) -> None:
    """A server that says :40 may mean any moment of that second."""
    date = f"Thu, 01 Jan 1970 00:00:{second} GMT"
    found = clock.of_answer("gpu", date, "", began, began)
    assert found is not None
    assert found.status == status


def test_an_answer_without_a_date_says_nothing() -> None:
    """No header, or one that is no date, is no finding."""
    assert clock.of_answer("gpu", "", "", 1.0, 2.0) is None
    assert clock.of_answer("gpu", "yesterday", "", 1.0, 2.0) is None
