"""`keepgate serve` as a process of its own, started, called and stopped as by an operator."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.gateway.client import CHAT, Answer, chat
from tests.waiting import until

KEEPGATE = Path(sys.executable).with_name("keepgate")
# Ample for a busy machine; what takes longer hangs.
DEADLINE = 60.0


class Serving:
    """A running `keepgate serve`; `lines` is its output so far."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.url = ""
        self.lines: list[str] = []
        self.asked = 0
        self._news = asyncio.Condition()
        self._reading = asyncio.create_task(self._read())

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    @property
    def status(self) -> int | None:
        return self.process.returncode

    async def until_said(self, words: str, times: int = 1) -> None:
        """Return when that many lines contain `words`."""

        def is_said() -> bool:
            return sum(words in line for line in self.lines) >= times

        async with asyncio.timeout(DEADLINE), self._news:
            await self._news.wait_for(lambda: is_said() or self._reading.done())
        assert is_said(), f"it never said {words!r}, but:\n{self.said}"

    async def until_ready(self) -> None:
        await self.until_said("Ready")
        self.find_url()

    def find_url(self) -> None:
        """Finds the URL of a gateway that serves before it is ready."""
        match = re.search(r"serving +(http://\S+)/v1", self.said)
        assert match is not None
        self.url = match[1]

    async def ask(self, content: str = "hello", **fields: Any) -> Answer:
        """A chat; with several workers any of them may answer. `asked` counts them."""
        self.asked += 1
        return await self.send("POST", CHAT, chat(content, **fields))

    async def send(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """Send a request on a connection of its own; `headers` with underscores for hyphens."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            asyncio.timeout(DEADLINE),
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=body, headers=named) as response,
        ):
            return Answer(response.status, response.headers, await response.read())

    async def stats(self) -> dict[str, Any]:
        answer = await self.send("GET", "/v1/cache/stats")
        assert answer.status == 200, f"{answer.body!r}\n{self.said}"
        stats: dict[str, Any] = answer.json
        return stats

    async def until_semantic(self, name: str, least: int = 1) -> None:
        """Return once a figure of the semantic cache is at least this in the worker that answers."""

        async def is_reached() -> bool:
            return bool((await self.stats())["layers"]["semantic"].get(name, 0) >= least)

        await until(is_reached, DEADLINE, every=0.05)

    async def signal(self, number: signal.Signals) -> int:
        """Send the signal to this process alone, and return the exit status."""
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """The exit status, once all output is read."""
        async with asyncio.timeout(DEADLINE):
            status = await self.process.wait()
            await self._reading
        return status

    def children(self) -> dict[int, str]:
        """The processes it has started: pid -> command line."""
        return {pid: command for pid, command in processes().items() if parent_of(pid) == self.pid}

    def child(self, words: str) -> int:
        """The pid of the one child with these words in its command line."""
        (pid,) = (pid for pid, command in self.children().items() if words in command)
        return pid

    async def close(self) -> None:
        if self.status is None:
            self.process.kill()
        await self.ended()

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            async with self._news:
                self.lines.append(line.decode().rstrip("\n"))
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()


@asynccontextmanager
async def serving(state: Path, *words: str, ready: bool = True, **variables: str) -> AsyncIterator[Serving]:
    """Run `keepgate serve --port 0` with these further words; killed at the end if it still runs.

    Lookups in the store have a long deadline, so that a busy machine does not turn a hit into a miss. The gateway has
    its own temporary folder, which must be empty at the end.
    """
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KEEPGATE_")}
    environment = {
        **plain,
        "KEEPGATE_PORT": "0",
        "KEEPGATE_STATE_DIR": str(state),
        "KEEPGATE_CACHE_REDIS_DEADLINE": "5",
        **variables,
    }
    with tempfile.TemporaryDirectory(prefix="kg-") as temporary:
        process = await asyncio.create_subprocess_exec(
            KEEPGATE,
            "serve",
            *words,
            env={"TMPDIR": temporary, **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        run = Serving(process)
        try:
            if ready:
                await run.until_ready()
            yield run
        finally:
            await run.close()
        left = os.listdir(temporary)
        assert not left, f"the temporary folder still has {left}"


def processes() -> dict[int, str]:
    """All running processes: pid -> command line. A zombie is not one of them."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if command:
                found[int(entry.name)] = command
    return found


def parent_of(pid: int) -> int:
    """0 for an ended process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def open_files(pid: int) -> set[str]:
    """The paths of the files that a process has open."""
    found: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since
            found.add(os.readlink(descriptor))
    return found


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until_gone(*pids: int) -> None:
    """Return when none of these processes runs any more. Raises TimeoutError."""
    await until(lambda: not any(pid in processes() for pid in pids), DEADLINE, every=0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
