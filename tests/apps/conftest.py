"""Real clients and apps, each in an environment of its own, against a running gateway.

`make test-clients` installs them and names their folder in TEST_CLIENTS; without it these tests are not collected.
"""

import os
from collections.abc import AsyncIterator

import pytest

from tests.apps.upstream import AppUpstream
from tests.gateway.conftest import pytest_asyncio_loop_factories, stage

__all__ = ["pytest_asyncio_loop_factories", "stage"]

collect_ignore_glob = [] if "TEST_CLIENTS" in os.environ else ["test_*.py"]


@pytest.fixture
async def upstream() -> AsyncIterator[AppUpstream]:
    scripted = AppUpstream()
    async with scripted.serving():
        yield scripted
