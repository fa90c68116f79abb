"""Faults of the gateway's own processes."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.fault import Fault
from tests.chaos.stage import Stage

_WORKER = "gateway.processes.worker"


@asynccontextmanager
async def _worker_killed(stage: Stage) -> AsyncIterator[None]:
    for gateway in stage.gateways:
        os.kill(gateway.child(_WORKER), signal.SIGKILL)
    yield


FAULTS = (Fault("a worker of each gateway: killed", _worker_killed, cut=True),)
