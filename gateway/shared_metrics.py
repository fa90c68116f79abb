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
