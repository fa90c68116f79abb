"""A process that lives no longer than the gateway."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO

_STOP_DEADLINE = 10.0
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Runs in the child before it becomes its program: the kernel ends it even when the gateway is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@asynccontextmanager
async def running(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command as a child in a session of its own, so that Ctrl-C reaches only the gateway, which stops the rest.

    On leaving it gets SIGTERM and, if it does not end within a deadline, SIGKILL.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    try:
        yield process
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    for end in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_DEADLINE):
                await process.wait()
