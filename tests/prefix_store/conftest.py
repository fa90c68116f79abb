"""Fixtures of the prefix store's tests: a real Valkey, a real cluster, and the event loop of the engine's server."""

from collections.abc import Iterator

import pytest

from tests.event_loop import pytest_asyncio_loop_factories
from tests.prefix_store.index.cluster import Cluster
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


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Redis Cluster of three nodes, each with a third of the slots."""
    with Cluster.running() as started:
        yield started
