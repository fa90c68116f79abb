"""Background work that fails is logged, and ends only what depends on it."""

import asyncio
import logging

import pytest

from gateway.http import background_tasks as module
from gateway.http.background_tasks import background_tasks

SECRET = "what a tenant wrote"


async def fail() -> None:
    raise ValueError(SECRET)


async def test_work_that_concerns_nobody_else_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the type of its error, not the message."""
    with caplog.at_level(logging.ERROR):
        async with background_tasks() as tasks:
            await tasks.start_isolated(fail())

    assert "ValueError" in caplog.text
    assert SECRET not in caplog.text


async def test_work_without_end_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It restarts after every failure."""
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    begun = asyncio.Semaphore(0)

    async def work() -> None:
        begun.release()
        await fail()

    async with asyncio.timeout(10), background_tasks() as tasks:
        tasks.keep(work)
        for _ in range(3):
            await begun.acquire()


async def test_work_that_the_scope_needs_ends_it() -> None:
    """The scope raises the work's exception."""

    async def scope() -> None:
        async with background_tasks() as tasks:
            tasks.start(fail())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await scope()

    assert caught.group_contains(ValueError, match=SECRET)
