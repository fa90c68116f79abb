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
_KINDS = ("counter", "histogram", "gauge_livesum", "gauge_mostrecent")
# Several times of what all series of gateway/metrics.py take; a file that is too small would grow.
_FILE_BYTES = 2**21


@contextmanager
def share_metrics(state: Path) -> Iterator[None]:
    """In the first process: make the directory, which is removed on exit. Raises OSError without a place for it."""
    with runtime_directory(state) as directory:
        _allocate_files(directory)
        os.environ[_VARIABLE] = str(directory)
        try:
            yield
        finally:
            del os.environ[_VARIABLE]


def join_metrics() -> None:
    """In a worker: create the metrics, and move their files to the shared directory once they can be read. Raises
    OSError if there is no place for them.

    prometheus_client fails on a new file, which is empty for a moment.
    """
    shared = Path(os.environ[_VARIABLE])
    with tempfile.TemporaryDirectory(dir=shared) as own:
        _allocate_files(Path(own))
        os.environ[_VARIABLE] = own
        import gateway.metrics  # noqa: F401  # for its effect: each kind of metric opens its file

        for file in Path(own).iterdir():
            file.rename(shared / file.name)  # it stays open and mapped
    os.environ[_VARIABLE] = str(shared)


def _allocate_files(directory: Path) -> None:
    """Make the files that this process is about to map, so that they have their place on the disk.

    prometheus_client makes files without any: a process that writes to one on a full disk is killed (SIGBUS).
    """
    for kind in _KINDS:
        (directory / f"{kind}_{os.getpid()}.db").write_bytes(bytes(_FILE_BYTES))


def forget_process(pid: int) -> None:
    """Remove the gauges of a worker that has ended. Its counters still count."""
    from prometheus_client.multiprocess import mark_process_dead  # only after share_metrics: it looks at the variable

    mark_process_dead(pid)  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
