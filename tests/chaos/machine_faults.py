"""Faults of the machine: its disk, and its clock."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from tests.chaos.fault import Fault
from tests.chaos.machine import filled
from tests.chaos.stage import Stage

_HOUR, _DAY = 3600, 86_400


@asynccontextmanager
async def _disk_full(stage: Stage) -> AsyncIterator[None]:
    with filled(stage.state):
        yield


def _clock_set(seconds: int) -> Callable[[Stage], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def hold(stage: Stage) -> AsyncIterator[None]:
        assert stage.clock is not None
        stage.clock.step(seconds)
        try:
            yield
        finally:
            stage.clock.step(0)

    return hold


FAULTS = (
    Fault("disk: full", _disk_full, setting="small disk"),
    *(
        Fault(f"clock: set {words}", _clock_set(seconds), setting="own clock")
        for words, seconds in (
            ("an hour ahead", _HOUR),
            ("an hour back", -_HOUR),
            ("two days ahead", 2 * _DAY),
            ("two days back", -2 * _DAY),
        )
    ),
)
