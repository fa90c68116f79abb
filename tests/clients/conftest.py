"""Real clients against a running gateway, which stands in front of the scripted upstream."""

from collections.abc import Iterator

import pytest

from tests.clients.node import Node, install, npm_cache
from tests.gateway.conftest import pytest_asyncio_loop_factories, stage

__all__ = ["pytest_asyncio_loop_factories", "stage"]


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """A Node.js process with the npm clients."""
    with Node.running(install(npm_cache())) as process:
        yield process
