"""Child processes that end with the gateway."""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import IO

_STOP_DEADLINE = 10.0
_PR_SET_PDEATHSIG = 1


@asynccontextmanager
async def running(
    command: Sequence[str],
    *,
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    stop_deadline: float = _STOP_DEADLINE,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the command as a child in a session of its own: Ctrl-C reaches only the gateway, which stops its children.

    Its environment is the gateway's own and `variables`.

    On leaving it gets SIGTERM and, if it does not end within `stop_deadline` seconds, SIGKILL. On Linux it gets
    SIGTERM as well when the gateway itself is killed. Raises OSError when the program cannot be run.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        env={**os.environ, **variables},
        start_new_session=True,
        preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
    )
    try:
        yield process
    finally:
        await _stop(process, stop_deadline)


def _die_with_parent() -> Callable[[], None]:
    """A function for the child, before exec: end with the parent. What it needs is looked up before the fork."""
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent was killed in between: the signal will not come
            os._exit(1)

    return arrange


async def _stop(process: asyncio.subprocess.Process, deadline: float) -> None:
    for end in (process.terminate, process.kill):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline):
                await process.wait()
