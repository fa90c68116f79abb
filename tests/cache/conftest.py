"""What the tests of the cache have: a real Valkey, a store in it, and the embedding model."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from cache.semantic.embedding.encoder import Encoder
from cache.semantic.embedding.load import load_encoder
from cache.semantic.embedding.model_files import models_folder
from cache.stores.redis_store import RedisStore, open_redis_store
from tests.cache.valkey import Valkey
from tests.cache.valkey_cluster import ValkeyCluster, ValkeySentinels, running_cluster, running_sentinels
from tests.event_loop import pytest_asyncio_loop_factories
from tests.valkey_fixtures import folder, late_valkey, own_valkey, raw, shared_valkey, valkey

__all__ = [
    "folder",
    "late_valkey",
    "own_valkey",
    "pytest_asyncio_loop_factories",
    "raw",
    "shared_valkey",
    "valkey",
]

# Far longer than the default, so that a test about something else does not turn on how busy the machine is.
PATIENT = 2.0


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    """The default embedding model. It is compiled once for all runs, which takes some seconds."""
    return load_encoder("default", models_folder())


@pytest.fixture
async def redis_store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    async with open_redis_store(valkey.url, PATIENT) as store:
        yield store


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[ValkeyCluster]:
    """A cluster of three masters with a replica each."""
    # A loop of its own: the servers outlive the loops of the tests.
    with asyncio.Runner() as runner:
        running = running_cluster(with_replicas=True)
        yield runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def shared_sentinels() -> Iterator[ValkeySentinels]:
    """A master with two replicas, and three sentinels."""
    with asyncio.Runner() as runner:
        running = running_sentinels()
        yield runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))


@pytest.fixture
async def cluster(shared_cluster: ValkeyCluster) -> ValkeyCluster:
    """The session's cluster, emptied."""
    await shared_cluster.flush()
    return shared_cluster


@pytest.fixture
async def sentinels(shared_sentinels: ValkeySentinels) -> ValkeySentinels:
    """The session's sentinels, whose servers are emptied."""
    await shared_sentinels.flush()
    return shared_sentinels
