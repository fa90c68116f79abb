"""Counters that several workers of a host add to; switched on before any counter is made.

prometheus_client keeps the values of each process in files of one directory, and each process reads those of all.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share_metrics() -> None:
    """In the first process: make the directory, which goes when this process ends."""
    directory = tempfile.mkdtemp(prefix="keepgate-metrics-")
    os.environ[_VARIABLE] = directory
    atexit.register(shutil.rmtree, directory, ignore_errors=True)


def join_metrics() -> None:
    """In a worker: make the counters, and show their files to the others only when they can be read.

    A file that has just been made is empty for a moment, and whoever reads it then fails.
    """
    shared = Path(os.environ[_VARIABLE])
    with tempfile.TemporaryDirectory(dir=shared) as own:
        os.environ[_VARIABLE] = own
        import gateway.metrics  # noqa: F401  # for its effect: each kind of metric opens its file

        for file in Path(own).iterdir():
            file.rename(shared / file.name)  # it stays open and mapped
    os.environ[_VARIABLE] = str(shared)


def forget_process(pid: int) -> None:
    """Leave out the states, such as entries in memory, of a worker that is gone. What it counted stays counted."""
    from prometheus_client.multiprocess import mark_process_dead  # only after share_metrics: it looks at the variable

    mark_process_dead(pid)  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
