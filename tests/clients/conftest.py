"""Real clients against a running gateway, which stands in front of the scripted upstream."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.node import Node, install
from tests.gateway.conftest import pytest_asyncio_loop_factories, stage

__all__ = ["pytest_asyncio_loop_factories", "stage"]


@pytest.fixture(scope="session")
def node() -> Iterator[Node]:
    """A Node.js process with the npm clients."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with Node.running(install(cache / "keepgate" / "tests")) as process:
        yield process
