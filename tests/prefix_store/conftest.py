"""A real Valkey for the prefix store, as the cache's tests have it, and the event loop of the engine's server."""

from collections.abc import Iterator

import pytest

from tests.cache.conftest import (  # noqa: F401 (fixtures, used by name)
    folder,
    late_valkey,
    own_valkey,
    pytest_asyncio_loop_factories,
    raw,
    shared_valkey,
    valkey,
)
from tests.prefix_store.index.cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Redis Cluster of three nodes, each with a third of the slots."""
    with Cluster.running() as started:
        yield started
