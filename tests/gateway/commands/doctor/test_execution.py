"""Running checks: each is a part of the report, whatever becomes of it."""

import asyncio
import threading
import time

from gateway.commands.doctor.execution import Check, in_thread, run_checks
from gateway.commands.doctor.finding import Finding, ok


async def fine() -> list[Finding]:
    return [ok("fine", "well")]


async def failing() -> list[Finding]:
    raise KeyError("no such field")


async def endless() -> list[Finding]:
    await asyncio.Event().wait()
    return []


async def test_a_check_that_fails_itself_is_a_problem_and_the_others_are_told() -> None:
    """An exception in a check is a finding with its place; it neither ends the others nor changes their order."""
    found = await run_checks([Check("broken", 5, failing), Check("fine", 5, fine)])
    assert [(each.check, each.status) for each in found] == [("broken", "problem"), ("fine", "ok")]
    assert "KeyError: 'no such field' (test_execution.py:" in found[0].summary
    assert "report it" in found[0].advice


async def test_a_check_beyond_its_deadline_is_a_problem() -> None:
    """A check that does not end is given up after its deadline, which its finding names."""
    (found,) = await run_checks([Check("stuck", 0.01, endless)])
    assert (found.status, found.summary) == ("problem", "the check did not end within 0.01 s")


async def test_checks_run_at_the_same_time() -> None:
    """A check can wait for another one: they are not run in turn."""
    arrived = asyncio.Barrier(2)

    async def meet() -> list[Finding]:
        await arrived.wait()
        return [ok("met", "")]

    assert len(await run_checks([Check("one", 5, meet), Check("two", 5, meet)])) == 2


async def test_a_call_that_hangs_in_the_system_holds_nothing_up() -> None:
    """A blocking call beyond the deadline leaves the event loop free, and its thread does not keep the process."""
    release = threading.Event()

    async def hang() -> list[Finding]:
        await in_thread(release.wait)
        return []

    began = time.monotonic()
    found = await run_checks([Check("disk", 0.05, hang), Check("fine", 5, fine)])
    assert [each.status for each in found] == ["problem", "ok"]
    assert time.monotonic() - began < 5
    hanging = [thread for thread in threading.enumerate() if thread.name == "doctor"]
    assert all(thread.daemon for thread in hanging)
    assert hanging
    release.set()


async def test_what_a_thread_raises_is_raised_where_it_is_awaited() -> None:
    """An exception in the thread comes out of `in_thread`."""

    def fail() -> None:
        raise OSError("gone")

    (found,) = await run_checks([Check("disk", 5, lambda: in_thread(fail))])  # type: ignore[arg-type]
    assert "OSError: gone" in found.summary


def test_a_finding_is_one_line_without_control_characters() -> None:
    """Line breaks and escape sequences in what a server says do not reach the terminal."""
    assert ok("x", "a\n b\x1b[31m\tc").summary == "a b [31m c"
