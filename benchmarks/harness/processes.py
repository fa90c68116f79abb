"""The processes of a measurement, each on a core of its own, and what the kernel says about them."""

import asyncio
import functools
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "data"

_START_DEADLINE = 60.0
_PERIOD_MICROS = 10_000
_STOP_DEADLINE = 30.0


class CannotMeasure(Exception):
    """Something a figure needs is not there; the message says what, and how to get it."""


@dataclass(frozen=True, slots=True)
class Cores:
    """`subject` is for the process that is measured alone, `load` for all that surrounds it; `all` are there."""

    subject: frozenset[int]
    load: frozenset[int]
    all: frozenset[int]


@functools.cache  # asked once, before any process of the harness moves to its own core
def cores() -> Cores:
    """Two cores of this machine. Raises CannotMeasure where there is one only."""
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise CannotMeasure("Two cores are needed: one for what is measured, one for the load.")
    return Cores(frozenset(usable[:1]), frozenset(usable[1:2]), frozenset(usable))


@dataclass(frozen=True, slots=True)
class Server:
    """A process that listens on `port`, and the processes that share it. `key` is the virtual key for requests."""

    pid: int
    port: int
    workers: tuple[int, ...] = ()
    key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        # The kernel's encoding of "the CPU clock of process pid" (clock_getcpuclockid(3)): nanoseconds, where
        # /proc/<pid>/stat counts in ticks of 10 ms.
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in (self.pid, *self.workers))

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii")
        return [int(pid) for pid in listed.split()]


def authorization(server: Server) -> str:
    """The line of a request's head with the server's key, if it has one."""
    return f"Authorization: Bearer {server.key}\r\n" if server.key else ""


def resident_bytes(pid: int) -> int:
    """Resident set size (VmRSS)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    if found is None:
        raise CannotMeasure(f"/proc/{pid}/status has no VmRSS: the process is gone.")
    return int(found[1]) * 1024


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def server(
    command: Sequence[str],
    port: int,
    on: frozenset[int],
    environment: Mapping[str, str] | None = None,
    patience: float = _START_DEADLINE,
    cwd: Path = ROOT,
) -> AsyncIterator[Server]:
    """The command, listening on `port`, on these cores until the end of the block. Raises CannotMeasure."""
    # One hash seed for both sides of a comparison: dict layouts are not part of what is compared.
    given = {**os.environ, "PYTHONHASHSEED": "0", **(environment or {})}
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=cwd, env=given, stdout=log, stderr=log, preexec_fn=lambda: os.sched_setaffinity(0, on)
        )
        try:
            try:
                await _wait_until_listening(process, port, command, patience)
            except CannotMeasure as failure:
                log.seek(0)
                said = log.read().decode(errors="replace").strip()
                raise CannotMeasure(f"{failure} It said: {said or 'nothing'}") from failure
            yield Server(process.pid, port)
        finally:
            await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_DEADLINE):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _wait_until_listening(
    process: asyncio.subprocess.Process, port: int, command: Sequence[str], patience: float
) -> None:
    name = " ".join(command[1:4])
    try:
        async with asyncio.timeout(patience):
            while True:
                if process.returncode is not None:
                    raise CannotMeasure(f"`{name}` ended with status {process.returncode} at its start.")
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                return
    except TimeoutError as error:
        raise CannotMeasure(f"`{name}` did not listen within {patience:g} s.") from error


@asynccontextmanager
async def gateway(
    *upstreams: str,
    on: frozenset[int],
    redis: str = "embedded",
    workers: int = 1,
    program: Sequence[str] = ("-m", "gateway"),
    **settings: str,
) -> AsyncIterator[Server]:
    """`keepgate serve`, by this `program` for Python. Its embedded store runs on the other cores of the load.

    `settings` are KEEPGATE_* variables without their prefix, such as `cache_memory="64MiB"`.
    """
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="keepgate-bench-") as state:
        environment = {f"KEEPGATE_{name.upper()}": value for name, value in settings.items()}
        environment |= {"KEEPGATE_STATE_DIR": state, "KEEPGATE_LOG_LEVEL": "error"}
        words = [word for url in upstreams for word in ("--upstream", url)]
        command = [sys.executable, *program, "serve", "--port", str(port), "--redis", redis, *words]
        if workers > 1:
            command += ["--workers", str(workers)]
        async with server(command, port, on, environment) as started:
            others: list[int] = []
            for child in started.children():
                if _is_worker(child):
                    others.append(child)
                else:
                    os.sched_setaffinity(child, cores().load)
            yield replace(started, workers=tuple(others))


def _is_worker(pid: int) -> bool:
    return b"gateway.processes.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def limited(pids: Collection[int], share: float) -> Iterator[None]:
    """Give each process so much of a core at most, by a control group of its own. Raises CannotMeasure."""
    root = Path("/sys/fs/cgroup")
    groups: list[Path] = []
    try:
        try:
            for pid in pids:
                unified = (root / "cgroup.controllers").exists()
                group = root / ("" if unified else "cpu") / f"keepgate-bench-{pid}"
                group.mkdir()
                groups.append(group)
                quota = f"{round(share * _PERIOD_MICROS)}"
                if unified:
                    (group / "cpu.max").write_text(f"{quota} {_PERIOD_MICROS}")
                else:
                    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROS))
                    (group / "cpu.cfs_quota_us").write_text(quota)
                (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise CannotMeasure(f"This figure needs control groups for CPU time, as root: {error}") from error
        yield
    finally:
        for pid, group in zip(pids, groups, strict=False):
            if Path(f"/proc/{pid}").exists():
                (group.parent / "cgroup.procs").write_text(str(pid))
            group.rmdir()


@asynccontextmanager
async def upstream(*, service_time: float = 0.0, chunks: int = 64, pause: float = 0.0) -> AsyncIterator[Server]:
    """The upstream of `benchmarks/harness/mock_upstream.py`, on the core of the load."""
    port = free_port()
    options = {"port": port, "service-time": service_time, "chunks": chunks, "pause": pause}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "benchmarks.harness.mock_upstream", *words]
    async with server(command, port, cores().load) as started:
        yield started


@asynccontextmanager
async def stream_load() -> AsyncIterator[Server]:
    """The upstream and clients of `benchmarks/harness/stream_load.py`, on the core of the load."""
    port = free_port()
    async with server(
        [sys.executable, "-m", "benchmarks.harness.stream_load", str(port)], port, cores().load
    ) as started:
        yield started


@asynccontextmanager
async def bare_server(answer: Path, content_type: str = "application/json") -> AsyncIterator[Server]:
    """The reference of `benchmarks/harness/bare_server.py`, which answers everything with the bytes of a file."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.harness.bare_server", str(port), "--answer", str(answer)]
    async with server([*command, "--content-type", content_type], port, cores().subject) as started:
        yield started


@asynccontextmanager
async def bare_relay(url: str) -> AsyncIterator[Server]:
    """The reference of `benchmarks/harness/bare_server.py`, which hands on what the server at `url` says."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.harness.bare_server", str(port), "--relay", url]
    async with server(command, port, cores().subject) as started:
        yield started


async def run_on_subject_core(module: str, *words: str) -> bytes:
    """What a program of this package writes, run alone on the core of the subject. Raises CannotMeasure."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return await run_program(module, (sys.executable, "-m", module, *words), cores().subject, one_thread)


async def run_on_all_cores(module: str, *words: str) -> bytes:
    """As `run_on_subject_core`, with all cores and as many threads as the program likes."""
    return await run_program(module, (sys.executable, "-m", module, *words), cores().all)


async def run_program(
    name: str,
    command: Sequence[str],
    on: Collection[int],
    environment: Mapping[str, str] = MappingProxyType({}),
    cwd: Path = ROOT,
) -> bytes:
    """What a command writes that is run to its end on these cores.

    Args:
        environment: what is added to that of this process.

    Raises:
        CannotMeasure: it ended with another status than 0; the message has its last line of complaint.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
        preexec_fn=lambda: os.sched_setaffinity(0, on),
    )
    said, complaint = await process.communicate()
    if process.returncode:
        last = complaint.decode(errors="replace").strip().splitlines()[-1:]
        raise CannotMeasure(f"{name} ended with status {process.returncode}: {''.join(last)}")
    return said
