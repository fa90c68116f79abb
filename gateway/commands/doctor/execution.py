"""Runs checks at the same time, each within its deadline. A check that fails itself is a finding too."""

import asyncio
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gateway.commands.doctor.finding import Finding, problem

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """A check, and the seconds after which it is given up."""

    name: str
    deadline: float
    run: Callable[[], Awaitable[Sequence[Finding]]]


async def run_checks(checks: Sequence[Check], on_end: Callable[[Check], None] = lambda check: None) -> list[Finding]:
    """The findings of all checks, in the order of the checks; `on_end` hears of each that has ended."""

    async def run(check: Check) -> Sequence[Finding]:
        found = await _run(check)
        on_end(check)
        return found

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(check)) for check in checks]
    return [finding for task in running for finding in task.result()]


async def in_thread(function: Callable[[], T]) -> T:
    """The result of a function that may block, such as on a file system that hangs.

    The thread is a daemon: one that hangs does not keep the command from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def end(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # None only where T is

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is awaited
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(end, result, failure)

    threading.Thread(target=work, name="doctor", daemon=True).start()
    return await future


async def _run(check: Check) -> Sequence[Finding]:
    try:
        async with asyncio.timeout(check.deadline):
            return await check.run()
    except TimeoutError:
        return [
            problem(
                check.name,
                f"the check did not end within {check.deadline:g} s",
                "something it asks does not answer: a file system, a server or a compiler; try again when the machine"
                " is less busy",
            )
        ]
    except Exception as error:  # noqa: BLE001  # the other checks say what they have found all the same
        frames = traceback.extract_tb(error.__traceback__)
        place = f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else "no place"
        return [
            problem(
                check.name,
                f"the check itself failed: {type(error).__name__}: {error} ({place})",
                "this is a fault of `keepgate doctor`; report it with this line",
            )
        ]
