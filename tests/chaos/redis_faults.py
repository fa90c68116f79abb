"""Faults of Redis: requests go on without what is stored."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import redis.asyncio

from tests.chaos.fault import Fault
from tests.chaos.stage import Stage

# A request that continues a stored conversation needs Redis.
_NEEDS_REDIS = frozenset({503})
_ELECTION = 4.0
# Between two tries to reach it at most, and a moment.
_SETTLING = 5.5


@asynccontextmanager
async def _frozen(stage: Stage) -> AsyncIterator[None]:
    assert stage.valkey is not None
    stage.valkey.freeze()
    try:
        yield
    finally:
        stage.valkey.thaw()


@asynccontextmanager
async def _killed(stage: Stage) -> AsyncIterator[None]:
    assert stage.valkey is not None
    await stage.valkey.kill()
    try:
        yield
    finally:
        await stage.valkey.start()


@asynccontextmanager
async def _full(stage: Stage) -> AsyncIterator[None]:
    async with _client(stage) as client:
        await client.config_set("maxmemory-policy", "noeviction")
        await client.config_set("maxmemory", "1")
        try:
            yield
        finally:
            await client.config_set("maxmemory", "0")


@asynccontextmanager
async def _read_only(stage: Stage) -> AsyncIterator[None]:
    async with _client(stage) as client:
        await client.replicaof("127.0.0.1", "1")
        try:
            yield
        finally:
            await client.replicaof("NO", "ONE")


@asynccontextmanager
async def _client(stage: Stage) -> AsyncIterator["redis.asyncio.Redis"]:
    assert stage.valkey is not None
    client = redis.asyncio.Redis.from_url(stage.valkey.url)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def _master_killed(stage: Stage) -> AsyncIterator[None]:
    assert stage.sentinels is not None
    master = await stage.sentinels.master()
    await master.kill()
    try:
        yield
    finally:
        await master.start()


@asynccontextmanager
async def _master_frozen(stage: Stage) -> AsyncIterator[None]:
    assert stage.sentinels is not None
    master = await stage.sentinels.master()
    master.freeze()
    try:
        yield
    finally:
        master.thaw()


def _of_sentinels(name: str, hold: Callable[[Stage], AbstractAsyncContextManager[None]]) -> Fault:
    return Fault(name, hold, continued=_NEEDS_REDIS, settling=_SETTLING, least=_ELECTION, setting="sentinels")


FAULTS = (
    Fault("Redis: frozen", _frozen, continued=_NEEDS_REDIS, settling=_SETTLING),
    Fault("Redis: killed", _killed, continued=_NEEDS_REDIS, settling=_SETTLING),
    Fault("Redis: full", _full),
    Fault("Redis: read-only", _read_only),
    _of_sentinels("Redis: master killed", _master_killed),
    _of_sentinels("Redis: master frozen", _master_frozen),
)
