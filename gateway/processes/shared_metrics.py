"""Metrics that all workers of a host share: prometheus_client's multiprocess mode.

It keeps the values of each process in files of one directory, and each process reads those of all. The directory is set
before any metric is created.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gateway.processes.runtime_directory import runtime_directory

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def share_metrics(state: Path) -> Iterator[None]:
    """In the first process: make the directory, which is removed on exit. Raises OSError if it cannot be made."""
    with runtime_directory(state) as directory:
        os.environ[_VARIABLE] = str(directory)
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def join_metrics() -> None:
    """In a worker: create the metrics, and move their files to the shared directory once they can be read.

    prometheus_client fails on a new file, which is empty for a moment.
    """
    shared = Path(os.environ[_VARIABLE])
    with tempfile.TemporaryDirectory(dir=shared) as own:
        os.environ[_VARIABLE] = own
        import gateway.metrics  # noqa: F401  # for its effect: each kind of metric opens its file

        for file in Path(own).iterdir():
            file.rename(shared / file.name)  # it stays open and mapped
    os.environ[_VARIABLE] = str(shared)


def forget_process(pid: int) -> None:
    """Remove the gauges of a worker that has ended. Its counters still count."""
    from prometheus_client.multiprocess import mark_process_dead  # only after share_metrics: it looks at the variable

    mark_process_dead(pid)  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
