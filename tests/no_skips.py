"""Where CI=true, a test that did not run is a test that failed; only a missing GPU excuses one.

The only skip reason let through is the one the gpu tests give. Everything else, a skip, an expected failure or a
module that skips itself while it is collected, turns into a failure that says why it was skipped.
"""

import os
from collections.abc import Generator

import pytest

EXCUSE = "needs a GPU"


def in_ci() -> bool:
    """Whether this is a run that counts."""
    return os.environ.get("CI") == "true"


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return why a report was skipped or expected to fail, without pytest's ``Skipped: `` in front."""
    if hasattr(report, "wasxfail"):
        return f"expected failure: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def judge(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Make a failure of a skipped report, in place, unless the run or the reason excuses it."""
    if report.outcome == "skipped" and in_ci() and (why := reason(report)) != EXCUSE:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} did not run, and CI={os.environ['CI']} counts that as a failure: {why}"
        if hasattr(report, "wasxfail"):
            del report.wasxfail


# First, and so around pytest's own: it is there that skips and expected failures get their outcome.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Judge each phase of each test."""
    report = yield
    judge(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Judge each module, which may skip itself as a whole."""
    report = yield
    judge(report)
    return report
