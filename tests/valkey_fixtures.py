"""A real Valkey: one for the session, and one of its own for a test that freezes or kills it."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis.asyncio

from tests.cache.valkey import Valkey


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
    await shared_valkey.flush()
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
