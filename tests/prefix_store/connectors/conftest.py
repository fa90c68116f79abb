"""Engines of the tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from prefix_store.store.config import StoreConfig
from tests.prefix_store.connectors.paged_engine.engine import PagedEngine, Setup, paged_engine

Start = Callable[..., PagedEngine]
"""Starts an engine: ``start(memory_bytes=…, disk=…, **setup)``. Without either it has the disk of the test."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Engines that end with the test, over one folder."""
    with ExitStack() as stack:

        def start(memory_bytes: int = 0, disk: bool | None = None, **setup: Any) -> PagedEngine:
            folder = tmp_path / "kv" if disk or (disk is None and not memory_bytes) else None
            config = StoreConfig(memory_bytes=memory_bytes, disk=folder, disk_bytes=2**20)
            return stack.enter_context(paged_engine(Setup(config, **setup)))

        yield start
