"""Real clients against a running gateway, which stands in front of the scripted upstream."""

from collections.abc import Iterator

import pytest

from tests.backend.conftest import model, source, start_server
from tests.clients.node import Node, install, npm_cache
from tests.gateway.conftest import folder, minilm, pytest_asyncio_loop_factories, shared_valkey, stage, valkey
from tests.gateway.semantic.conftest import semantic

__all__ = [
    "folder",
    "minilm",
    "model",
    "pytest_asyncio_loop_factories",
    "semantic",
    "shared_valkey",
    "source",
    "stage",
    "start_server",
    "valkey",
]


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """A Node.js process with the npm clients."""
    with Node.running(install(npm_cache())) as process:
        yield process
