"""The step uses all threads where they help, and one beside a busy process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backend.runners.fused.thread_count import ThreadCount

ROWS = 8


def run(choice: ThreadCount, steps: int, seconds: Callable[[int], float], rows: int = ROWS) -> list[int]:
    """Threads of each step, when a step with n threads takes ``seconds(n)``."""
    used = []
    for _ in range(steps):
        threads = choice.threads(rows)
        choice.record(rows, threads, seconds(threads))
        used.append(threads)
    return used


def quiet(threads: int) -> float:
    return 0.030 / threads


def busy(threads: int) -> float:
    return 0.030 if threads == 1 else 0.5


def test_all_threads_on_a_quiet_machine() -> None:
    """On a quiet machine every step uses all threads, except the first and one after every 256."""
    used = run(ThreadCount(2), 1000, quiet)
    assert [number for number, threads in enumerate(used) if threads == 1] == [0, 257, 514, 771]


def test_one_thread_beside_a_busy_neighbour() -> None:
    """Beside a busy process nearly every step uses one thread soon."""
    used = run(ThreadCount(2), 4000, busy)
    assert used.count(2) < 20
    choice = ThreadCount(2)
    run(choice, 500, quiet)
    assert run(choice, 4000, busy).count(2) < 20


def test_all_threads_again_when_the_neighbour_has_gone() -> None:
    """When the busy process has gone, steps use all threads again."""
    choice = ThreadCount(2)
    run(choice, 5000, busy)
    used = run(choice, 3000, quiet)
    assert used[-1000:].count(2) > 980


def test_a_single_slow_step_changes_nothing() -> None:
    """A single slow step does not change the number of threads."""
    choice = ThreadCount(2)
    run(choice, 10, quiet)
    choice.record(ROWS, 2, 0.5)
    assert choice.threads(ROWS) == 2


def test_slow_steps_count_only_in_a_row() -> None:
    """Slow steps count only in succession, and a step slightly slower than one thread alone is not slow."""
    choice = ThreadCount(2)
    run(choice, 10, quiet)
    for _ in range(5):
        choice.record(ROWS, 2, 0.5)
        choice.record(ROWS, 2, 0.015)
    assert choice.threads(ROWS) == 2
    for _ in range(5):
        choice.record(ROWS, 2, 1.1 * 0.030)
    assert choice.threads(ROWS) == 2


def test_busy_periods_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """A busy period is logged once, and those of the ten minutes after it are not; each begins with a short pause."""
    now = 0.0
    choice = ThreadCount(2, lambda: now)
    run(choice, 3000, busy)
    assert caplog.messages == ["another process keeps a core busy; going on with one thread for a while"]
    run(choice, 3000, quiet)
    assert run(choice, 19, busy) == [2] * 2 + [1] * 16 + [2]
    assert len(caplog.messages) == 1
    run(choice, 3000, quiet)
    now = 600.0
    run(choice, 19, busy)
    assert len(caplog.messages) == 2


def test_steps_of_other_sizes_are_not_compared() -> None:
    """Times of steps with other numbers of rows are not compared."""
    choice = ThreadCount(2)
    run(choice, 10, quiet)
    assert run(choice, 20, lambda threads: 0.9 / threads, rows=128) == [1] + [2] * 19
    assert run(choice, 20, quiet) == [2] * 20


@given(
    most=st.integers(1, 8),
    times=st.lists(st.tuples(st.integers(1, 512), st.floats(1e-4, 2)), max_size=200),
)
def test_the_thread_count_is_one_or_all(most: int, times: list[tuple[int, float]]) -> None:
    """The thread count is always one or all."""
    choice = ThreadCount(most)
    for rows, seconds in times:
        threads = choice.threads(rows)
        assert threads in (1, most)
        choice.record(rows, threads, seconds)
