"""Background work that fails is logged, and ends only what depends on it."""

import asyncio
import logging

import pytest

from gateway.http import background_tasks as module
from gateway.http.background_tasks import background_tasks

SECRET = "what a tenant wrote"


async def fail() -> None:
    raise ValueError(SECRET)


async def test_isolated_work_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """An exception of isolated work is logged by its type, without its message, and ends nothing else."""
    with caplog.at_level(logging.ERROR):
        async with background_tasks() as tasks:
            await tasks.start_isolated(fail())

    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


async def test_endless_work_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless work is restarted after every failure."""
    monkeypatch.setattr(module, "_PAUSE", 0.0)  # no setting, and too long for a test
    begun = asyncio.Semaphore(0)

    async def work() -> None:
        begun.release()
        await fail()

    async with asyncio.timeout(10), background_tasks() as tasks:
        tasks.keep(work)
        for _ in range(3):
            await begun.acquire()


async def test_a_failure_of_required_work_ends_the_scope() -> None:
    """A failure of required work is raised by its scope."""

    async def scope() -> None:
        async with background_tasks() as tasks:
            tasks.start(fail())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await scope()

    assert caught.group_contains(ValueError, match=SECRET)
