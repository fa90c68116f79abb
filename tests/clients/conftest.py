"""Real clients against a running gateway, which stands in front of the scripted upstream."""

from collections.abc import Iterator

import pytest

from tests.clients.node import Node, install, npm_cache
from tests.gateway.conftest import folder, pytest_asyncio_loop_factories, shared_valkey, stage, valkey

__all__ = ["folder", "pytest_asyncio_loop_factories", "shared_valkey", "stage", "valkey"]


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """A Node.js process with the npm clients."""
    with Node.running(install(npm_cache())) as process:
        yield process
