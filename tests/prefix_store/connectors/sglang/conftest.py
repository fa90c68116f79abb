"""Collected by the Python environment that KEEPGATE_SGLANG names, which has SGLang: `make test-sglang` makes one."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from prefix_store.connectors.sglang import KeepgateStorage

RUNS = Path(os.environ.get("KEEPGATE_SGLANG", os.devnull)).resolve() == Path(sys.prefix).resolve()
collect_ignore_glob = [] if RUNS else ["test_*.py"]
if RUNS:
    from tests.prefix_store.connectors.sglang import torchvision_schemas

    torchvision_schemas.define()

Attach = Callable[..., "KeepgateStorage"]
"""Attaches a backend to a host pool: ``attach(pool, rank={…}, **options)``. Without others its option is the test's
disk."""


@pytest.fixture(autouse=True)
def model(tmp_path: Path) -> Path:
    """The folder of a small model, with which an engine has been started."""
    from tests.prefix_store.connectors.sglang.engine import start_engine, write_model

    folder = tmp_path / "model"
    write_model(folder)
    start_engine(folder)
    return folder


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """The folder of the pages."""
    return tmp_path / "pages"


@pytest.fixture
def attach(disk: Path) -> Iterator[Attach]:
    """Backends that are closed with the test."""
    from tests.prefix_store.connectors.sglang.engine import attach_backend

    backends: list[KeepgateStorage] = []

    def attach(pool: Any, rank: dict[str, Any] | None = None, **options: Any) -> "KeepgateStorage":
        backend = attach_backend(pool, rank or {}, options or {"disk": str(disk), "disk_size": 2**30})
        backends.append(backend)
        return backend

    yield attach
    for backend in backends:
        backend.close()
