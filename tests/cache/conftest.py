"""A real Valkey: one for the session, and one of its own for a test that freezes or kills it."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import pytest
import redis.asyncio
import uvloop

from cache.redis_store import RedisStore, open_redis_store
from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.folder import models_folder
from cache.semantic.embedding.load import load_encoder
from tests.cache.valkey import Valkey

# Far longer than the default, so that a test about something else does not turn on how busy the machine is.
PATIENT = 2.0


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every test runs on the event loop that the gateway runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    """The default embedding model. It is exported once for all runs, which takes half a minute."""
    return load_encoder("default", models_folder())


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder with a short path: a unix socket's may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="kg-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def shared_valkey() -> Iterator[Valkey]:
    path = Path(tempfile.mkdtemp(prefix="kg-"))
    server = Valkey(path, "--appendonly", "no")
    # A loop of its own: the server outlives the loops of the tests.
    with asyncio.Runner() as runner:
        runner.run(server.start())
        yield server
        runner.run(server.stop())
    shutil.rmtree(path)


@pytest.fixture
async def valkey(shared_valkey: Valkey) -> Valkey:
    """The session's server, emptied."""
    client = redis.asyncio.Redis.from_url(shared_valkey.url)
    await client.flushall()
    await client.aclose()
    return shared_valkey


@pytest.fixture
async def late_valkey(folder: Path) -> AsyncIterator[Valkey]:
    """A server of this test alone that has yet to be started; every write is on disk before it is answered."""
    server = Valkey(folder)
    yield server
    await server.stop()


@pytest.fixture
async def own_valkey(late_valkey: Valkey) -> Valkey:
    """A server that this test alone may freeze and kill."""
    await late_valkey.start()
    return late_valkey


@pytest.fixture
async def raw(valkey: Valkey) -> AsyncIterator["redis.asyncio.Redis"]:
    """A plain client of the session's server, to look behind the store."""
    client = redis.asyncio.Redis.from_url(valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
async def redis_store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with open_redis_store(valkey.url, PATIENT) as store:
        yield store
