"""Faults of the gateway's own processes."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.chaos.fault import Fault
from tests.chaos.stage import Stage

_WORKER = "gateway.processes.worker"
_SEMANTIC = "cache.semantic.service"
_BACKEND = "-m backend"
_READY = "Ready: "
# What was under way breaks off, and until the backend is there again nobody answers.
_WITHOUT_BACKEND = frozenset({502, 503})


@asynccontextmanager
async def _worker_killed(stage: Stage) -> AsyncIterator[None]:
    for gateway in stage.gateways:
        os.kill(gateway.child(_WORKER), signal.SIGKILL)
    yield


@asynccontextmanager
async def _semantic_killed(stage: Stage) -> AsyncIterator[None]:
    for gateway in stage.gateways:
        os.kill(gateway.child(_SEMANTIC), signal.SIGKILL)
    yield


@asynccontextmanager
async def _semantic_frozen(stage: Stage) -> AsyncIterator[None]:
    services = [gateway.child(_SEMANTIC) for gateway in stage.gateways]
    for service in services:
        os.kill(service, signal.SIGSTOP)
    try:
        yield
    finally:
        for service in services:
            os.kill(service, signal.SIGCONT)


@asynccontextmanager
async def _backend_killed(stage: Stage) -> AsyncIterator[None]:
    (gateway,) = stage.gateways
    starts = gateway.said.count(_READY)
    os.kill(gateway.child(_BACKEND), signal.SIGKILL)
    try:
        yield
    finally:
        await gateway.until_said(_READY, times=starts + 1)


FAULTS = (
    Fault("a worker of each gateway: killed", _worker_killed, cut=True),
    Fault("backend: killed", _backend_killed, refused=_WITHOUT_BACKEND, told=True, setting="backend"),
    Fault("semantic cache: killed", _semantic_killed, setting="semantic"),
    Fault("semantic cache: frozen", _semantic_frozen, setting="semantic"),
)
