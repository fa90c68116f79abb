"""Background work with an owner: started inside a scope, cancelled and awaited when the scope ends."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


class Tasks:
    """The tasks of a scope. One that fails ends the scope with its exception."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._group.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()


@asynccontextmanager
async def background_tasks() -> AsyncIterator[Tasks]:
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        try:
            yield tasks
        finally:
            tasks.cancel()
