"""Engines of the tests."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from prefix_store.store.config import StoreConfig
from tests.prefix_store.connectors.paged_engine.engine import PagedEngine, Setup, paged_engine

Start = Callable[..., PagedEngine]
"""Starts an engine: ``start(memory_bytes=…, disk=…, mooncake=…, **setup)``. Without any it has the disk of the test."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Engines that end with the test, over one folder."""
    with ExitStack() as stack:

        def start(
            memory_bytes: int = 0, disk: Path | bool | None = None, mooncake: Path | None = None, **setup: Any
        ) -> PagedEngine:
            is_on_disk = disk if disk is not None else not (memory_bytes or mooncake)
            folder = disk if isinstance(disk, Path) else tmp_path / "kv" if is_on_disk else None
            config = StoreConfig(memory_bytes=memory_bytes, disk=folder, disk_bytes=2**20, mooncake=mooncake)
            return stack.enter_context(paged_engine(Setup(config, **setup)))

        yield start
