"""The matrix of faults and the soak, each for a moment; `make chaos` and `make soak` take longer."""

import asyncio
import time

import pytest

from tests.chaos.__main__ import FAULTS, try_all
from tests.chaos.fault import Fault, Trial, shown
from tests.chaos.load import TOTAL, Ask, Kind, Outcome, Stalls, Tenant
from tests.chaos.soak import soak

# So long that the first failures have been met, and retries made up for them.
SECONDS = 0.4
# So few that tests beside them find a core.
CLIENTS = 16
# The rest takes longer to set up than to try, and has tests of its own.
QUICK = [fault for fault in FAULTS if fault.setting in ("plain", "small disk", "own clock")]


@pytest.mark.parametrize("setting", ["plain", "small disk", "own clock"])
async def test_no_fault_gives_a_wrong_answer_or_a_needless_error(setting: str) -> None:
    """Under load each fault is met by what it allows, within deadlines, and all is well after it."""
    faults: list[Fault] = [fault for fault in QUICK if fault.setting == setting]
    trials, missing = await try_all(faults, SECONDS, CLIENTS)
    for reason in missing:
        pytest.skip(reason)
    assert not any(trial.problems for trial in trials), shown(trials)


async def test_load_leaves_nothing_behind() -> None:
    """When the load has stopped no request is counted, and no connection or file is open that was not before."""
    seen = await soak(4.0)
    assert not seen.problems


async def test_a_standstill_is_counted() -> None:
    """The seconds that the event loop is not run are counted, also before the counter is resumed; a wait is none."""
    stalls, began = Stalls(), time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(stalls.watch())
        await asyncio.sleep(0.2)
        waited = stalls.seconds()
        time.sleep(0.5)  # noqa: ASYNC251  # as if the machine had no time for this program
        stalled = stalls.seconds() - waited
        await asyncio.sleep(0.2)
        counted, passed = stalls.seconds(), time.monotonic() - began
        watching.cancel()
    assert 0.4 < stalled <= counted - waited
    assert counted < passed - 0.3
    assert stalls.seconds() == counted


@pytest.mark.parametrize(
    ("kind", "status", "took", "stalled", "problem"),
    [
        (Kind.RIGHT, 200, TOTAL + 2, 0.0, "late"),
        (Kind.RIGHT, 200, TOTAL + 2, 1.5, ""),
        (Kind.TOLD, 200, 1.0, 0.9, ""),
        (Kind.REFUSED, 504, 1.0, 0.9, ""),
        (Kind.REFUSED, 504, 1.0, 0.1, "refused"),
        (Kind.REFUSED, 500, 1.0, 0.9, "refused"),
        (Kind.CUT, 0, 1.0, 0.9, "cut"),
        (Kind.WRONG, 200, 1.0, 0.9, "wrong"),
    ],
)
def test_a_standstill_excuses_what_comes_too_late(
    kind: Kind, status: int, took: float, stalled: float, problem: str
) -> None:
    """An answer by as much as it lasted, and what says that time is up; nothing else, and never what is wrong."""
    ask = Ask(Tenant("key", "", ""), "chat", "?", "m", stream=False, is_hot=True)
    outcome = Outcome(ask, kind, 0.0, took, "why", status, stalled=stalled)
    trial = Trial(QUICK[0], [outcome], injected=20.0, gone=21.0, well=22.0)
    trial.judge()
    assert [each.partition(" ")[0].rstrip(":") for each in trial.problems] == [problem] * bool(problem)
