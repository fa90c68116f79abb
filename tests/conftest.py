"""What holds for every test of the repository."""

import signal
from collections.abc import Iterator

import pytest

pytest_plugins = ["tests.skips"]


@pytest.fixture(autouse=True)
def broken_pipes_are_no_end() -> Iterator[None]:
    """A command that was run in this process would leave it to end with the next socket that is closed on it."""
    yield
    assert signal.getsignal(signal.SIGPIPE) is signal.SIG_IGN
