"""Background work with an owner: started inside a scope, cancelled and awaited when the scope ends."""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger(__name__)

Work = Coroutine[Any, Any, None]

_PAUSE = 1.0


class BackgroundTasks:
    """The tasks of a scope."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Work) -> asyncio.Task[None]:
        """Work that the scope needs: if it fails, the scope ends with its exception."""
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def start_isolated(self, work: Work) -> asyncio.Task[None]:
        """Work that nothing depends on: if it fails, that is logged."""
        return self.start(_run_isolated(work))

    def keep(self, make_work: Callable[[], Work]) -> asyncio.Task[None]:
        """Work without end: if it fails, that is logged, and it is started again."""
        return self.start(_restarting(make_work))

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()


async def _run_isolated(work: Work) -> None:
    try:
        await work
    except Exception as fault:  # noqa: BLE001  # the last resort; it is logged
        # The frames name code; the message might quote what a tenant wrote.
        log.error(
            "background work failed: %s\n%s", type(fault).__name__, "".join(traceback.format_tb(fault.__traceback__))
        )


async def _restarting(make_work: Callable[[], Work]) -> None:
    while True:
        await _run_isolated(make_work())
        await asyncio.sleep(_PAUSE)


@asynccontextmanager
async def background_tasks() -> AsyncIterator[BackgroundTasks]:
    async with asyncio.TaskGroup() as group:
        tasks = BackgroundTasks(group)
        try:
            yield tasks
        finally:
            tasks.cancel()
