"""Counters that several workers of a host add to; switched on before any counter is made."""

import atexit
import os
import shutil
import tempfile


def share_metrics() -> None:
    """Let prometheus_client keep its values in files that all workers map; they go when this process ends."""
    directory = tempfile.mkdtemp(prefix="keepgate-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory
    atexit.register(shutil.rmtree, directory, ignore_errors=True)


def forget_process(pid: int) -> None:
    """Leave out the states, such as entries in memory, of a worker that is gone. What it counted stays counted."""
    from prometheus_client.multiprocess import mark_process_dead  # only after share_metrics: it looks at the variable

    mark_process_dead(pid)  # type: ignore[no-untyped-call]  # prometheus_client leaves it untyped
