"""Skipped tests: a failure where CI=true unless they need GPUs, and one line at the end of every run.

A skip, an expected failure and a module that skips itself while it is collected all count as skipped.
"""

import os
import re
from collections import Counter
from collections.abc import Generator

import pytest

NEEDS_GPU = re.compile(r"needs (a GPU|\d+ GPUs)")
"""The only reasons that CI accepts."""
_REMEDIES = {
    "needs a GPU": "needs a GPU: run make test-gpu on a machine that has one",
    "Mooncake cannot be loaded": "Mooncake needs libibverbs: apt-get install libibverbs1",
}
"""What a reason that begins like this is told as."""


def in_ci() -> bool:
    """Whether a skip counts as a failure."""
    return os.environ.get("CI") == "true"


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skip or of an expected failure, without pytest's ``Skipped: `` in front."""
    if hasattr(report, "wasxfail"):
        return f"expected failure: {report.wasxfail}"
    # A worker of pytest-xdist sends the tuple as it is.
    text = report.longrepr[2] if isinstance(report.longrepr, tuple | list) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def fail_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skipped report into a failure, in place, where CI does not accept its reason."""
    if report.outcome == "skipped" and in_ci() and not NEEDS_GPU.fullmatch(why := reason(report)):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} did not run, and CI={os.environ['CI']} counts that as a failure: {why}"
        if hasattr(report, "wasxfail"):
            del report.wasxfail


# First, and so around pytest's own wrapper, in which skips and expected failures get their outcome.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Check each phase of each test."""
    report = yield
    fail_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Check each module, which may skip itself as a whole."""
    report = yield
    fail_in_ci(report)
    return report


def _remedy(why: str) -> str:
    return next((remedy for start, remedy in _REMEDIES.items() if why.startswith(start)), why)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which tests did not run, and what each group of them needs."""
    reports = terminalreporter.getreports("skipped") + terminalreporter.getreports("xfailed")
    counts = Counter(_remedy(why) for why in map(reason, reports))
    if counts:
        groups = "; ".join(f"{count} ({why})" for why, count in counts.most_common())
        terminalreporter.write_line(f"Not run: {groups}")
