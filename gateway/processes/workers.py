"""Worker processes of `keepgate serve --workers N`, which share the port of the first.

The first process is the parent of the others and of the children that all use. It tells each worker over its standard
input, a line of JSON at a time: its settings, the socket of the semantic cache, then where each replica of the local
backend is, whenever that changes. The end of the input is the end of the worker.
"""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec

from gateway.processes.app import Gateway, open_gateway
from gateway.processes.child import running
from gateway.processes.local_backend import LocalUpstreams
from gateway.processes.shared_metrics import forget_process
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings
from telemetry.logs import configure_logging

log = logging.getLogger(__name__)

_PAUSE = 1.0
# Beyond the time that a worker gives its last requests.
_STOP_MARGIN = 5.0
_MAX_LINE = 2**24


class Backend(msgspec.Struct, frozen=True, tag="backend"):
    """The address of a replica of the local backend; an empty URL means that it has ended."""

    replica: int = 0
    url: str = ""
    model: str = ""


class NewSettings(msgspec.Struct, frozen=True, tag="settings"):
    """Settings that have been read again."""

    settings: Settings


class Workers:
    """The parent's side: keeps workers running and sends them the backends' addresses."""

    def __init__(self, settings: Settings, semantic_socket: Path | None) -> None:
        self._settings = settings
        self._semantic_socket = semantic_socket
        self._backends: dict[int, Backend] = {}
        self._inputs: set[asyncio.StreamWriter] = set()

    def tell(self, backend: Backend) -> None:
        self._backends[backend.replica] = backend
        for stdin in self._inputs:
            _write_line(stdin, backend)

    def tell_settings(self, settings: Settings) -> None:
        self._settings = settings
        for stdin in self._inputs:
            _write_line(stdin, NewSettings(settings))

    async def supervise_one(self) -> None:
        """Run a worker, and another when it ends."""
        command = (sys.executable, "-P", "-m", "gateway.processes.worker")
        while True:
            deadline = self._settings.timeouts.shutdown + _STOP_MARGIN
            async with running(command, stdin=asyncio.subprocess.PIPE, stop_deadline=deadline) as process:
                assert process.stdin is not None  # noqa: S101  # it was asked for
                _write_line(process.stdin, self._settings)
                _write_line(process.stdin, str(self._semantic_socket or ""))
                for backend in self._backends.values():
                    _write_line(process.stdin, backend)
                self._inputs.add(process.stdin)
                try:
                    status = await process.wait()
                finally:
                    self._inputs.discard(process.stdin)
            forget_process(process.pid)
            log.error("a worker ended with status %s; starting another", status)
            await asyncio.sleep(_PAUSE)


async def work() -> None:
    """The worker's side: serve until the parent closes the input."""
    news = await _standard_input()
    settings = _settings.decode(await news.readline())
    configure_logging(settings.log.format, settings.log_level)
    socket = msgspec.json.decode(await news.readline(), type=str)
    semantic_socket = Path(socket) if socket else None
    async with open_gateway(settings, share_port=True, semantic_socket=semantic_socket) as gateway:
        backends = LocalUpstreams(gateway, settings.backend.replicas)
        async for line in news:
            told = _news.decode(line)
            if isinstance(told, NewSettings):
                await _take_over(gateway, told.settings)
                continue
            backends.on_gone(told.replica)
            if told.url:
                backends.on_ready(told.replica, told.url, told.model)


async def _take_over(gateway: Gateway, settings: Settings) -> None:
    """The parent has applied the same settings before; what a worker alone cannot apply leaves it as it is."""
    try:
        await gateway.reload(settings)
    except SettingsError as error:
        log.error("the settings of a worker stay as they are: %s", error)


_settings = msgspec.json.Decoder(Settings, dec_hook=lambda kind, value: kind(value))
_news = msgspec.json.Decoder(Backend | NewSettings, dec_hook=lambda kind, value: kind(value))


def _write_line(stdin: asyncio.StreamWriter, value: Any) -> None:
    # Without a drain: a few lines fit into the pipe, and a worker that has ended is replaced.
    stdin.write(msgspec.json.encode(value, enc_hook=str) + b"\n")


async def _standard_input() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    return reader
