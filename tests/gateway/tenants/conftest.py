"""Workers of a gateway as far as keys and limits go: each with its own connections to Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from cache.stores.redis_store import RedisStore, open_redis_store
from gateway.http.background_tasks import BackgroundTasks, background_tasks
from gateway.settings.limits import KeySettings
from gateway.settings.settings import Settings
from gateway.tenants.caller import Caller
from gateway.tenants.callers import Callers
from gateway.tenants.key_registry import KeyRegistry
from gateway.tenants.limiter import Limiter, open_limiter
from gateway.tenants.virtual_key import Limits, VirtualKey
from tests.cache.valkey import Valkey

REDIS_DEADLINE = 0.5
"""Of lookups in these tests, which are about other things than a slow machine."""


@dataclass(frozen=True, slots=True)
class Worker:
    """The parts of one process."""

    redis: RedisStore
    callers: Callers
    limiter: Limiter
    registry: KeyRegistry


class Workers:
    """Starts workers, which stop at the end of the test."""

    def __init__(self, stack: AsyncExitStack, tasks: BackgroundTasks) -> None:
        self._stack = stack
        self._tasks = tasks

    async def start(self, valkey: Valkey, **keys: Any) -> Worker:
        """Another worker; `keys` are its settings of keys."""
        settings = Settings(redis=valkey.url, keys=KeySettings(required=True, **keys))
        redis = await self._stack.enter_async_context(open_redis_store(valkey.url, REDIS_DEADLINE))
        limiter = await self._stack.enter_async_context(open_limiter(redis, settings.keys))
        callers = Callers(redis, settings)
        following = self._tasks.keep(callers.follow)
        self._stack.push_async_callback(_ended, following)
        return Worker(redis, callers, limiter, KeyRegistry(redis))


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    async with background_tasks() as tasks, AsyncExitStack() as stack:
        yield Workers(stack, tasks)


def caller(name: str = "alice", team: str = "", team_limits: Limits | None = None, **limits: Any) -> Caller:
    """The caller with a key of this name and these limits."""
    key = VirtualKey(
        id=f"key_{name}",
        name=name,
        team=team,
        created=0.0,
        limits=Limits(**limits),
        team_limits=team_limits or Limits(),
    )
    return Caller("0" * 20, key.tenant, key)


def headers(**given: str) -> CIMultiDictProxy[str]:
    """Request headers; names with underscores for hyphens."""
    return CIMultiDictProxy(CIMultiDict({name.replace("_", "-"): value for name, value in given.items()}))
