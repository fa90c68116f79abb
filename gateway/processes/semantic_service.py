"""The semantic cache's process as a child: one for all workers of a host, started again when it ends."""

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cache.semantic.embedding.model_files import models_folder
from gateway.http.background_tasks import background_tasks
from gateway.processes.child import running
from gateway.processes.runtime_directory import runtime_directory, socket_path
from gateway.settings.encryption_keys import encryption_keys
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_MAX_PAUSE = 30.0
_STOP_DEADLINE = 5.0
# Its exit status after it has printed what is wrong with a setting.
_EXIT_CONFIG_ERROR = 2


@asynccontextmanager
async def semantic_service(settings: Settings, redis: str) -> AsyncIterator[Path | None]:
    """The socket of the running service; None if the semantic cache is off.

    `redis` is the URL of the store that gateways share, "" for none. Raises SettingsError when the dependencies are
    not installed, or when the service refuses a setting at its first start.
    """
    if settings.semantic.mode == "off":
        yield None
        return
    _require(settings, redis)
    with contextlib.ExitStack() as stack:
        try:
            directory = stack.enter_context(runtime_directory(settings.state_path()))
            socket = stack.enter_context(socket_path(directory, "semantic.sock"))
        except (OSError, ValueError) as error:
            raise SettingsError(f"state_dir: no place for the socket of the semantic cache: {error}") from error
        line = msgspec.json.encode(_config(settings, redis, socket), enc_hook=str) + b"\n"
        async with background_tasks() as tasks:
            tasks.start(_supervise(line))
            yield socket


def _require(settings: Settings, redis: str) -> None:
    if importlib.util.find_spec("faiss") is None or importlib.util.find_spec("sentence_transformers") is None:
        raise SettingsError(
            "semantic.mode: the semantic cache is not installed; install the extra: pip install 'keepgate[semantic]',"
            " or set semantic.mode (KEEPGATE_SEMANTIC_MODE) to off"
        )
    if not redis and settings.workers > 1:
        raise SettingsError(
            f"semantic.mode: {settings.workers} workers without a redis keep their answers apart; set redis, or workers"
            " to 1"
        )


def _config(settings: Settings, redis: str, socket: Path) -> dict[str, object]:
    """The fields of cache/semantic/service/config.py."""
    given = msgspec.structs.asdict(settings.semantic)
    del given["mode"], given["request_threshold"]
    return {
        **given,
        "model_key": str(settings.semantic.model_key or ""),
        "judge": judge_url(settings),
        "judge_key": str(settings.semantic.judge_key or ""),
        "encryption_keys": encryption_keys(settings.encryption),
        "socket": str(socket),
        "redis": redis,
        "models": str(models_folder()),
        "log_level": settings.log_level,
        "log_format": settings.log.format,
        "traces_endpoint": settings.traces.endpoint if settings.traces.exporter == "otlp" else "",
        "traces_file": settings.traces.file or "" if settings.traces.exporter == "file" else "",
    }


def judge_url(settings: Settings) -> str:
    """Where the judge asks a model, or "embedding". The upstreams it asks through this gateway, which routes, limits
    and charges these requests as any other.
    """
    if settings.semantic.judge != "upstream":
        return settings.semantic.judge
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104  # it is no address to bind
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}/v1"


async def _supervise(line: bytes) -> None:
    """Keep it running. Raises SettingsError when its first process refuses a setting; later ones are started again."""
    loop = asyncio.get_running_loop()
    pause = _FIRST_PAUSE
    for start in itertools.count():
        began = loop.time()
        try:
            status = await _run(line)
            if status == _EXIT_CONFIG_ERROR and start == 0:
                raise SettingsError  # it has printed which setting
            reason = f"ended with status {status}"
        except OSError as error:
            reason = f"cannot be started: {error}"
        pause = _FIRST_PAUSE if loop.time() - began > _MAX_PAUSE else min(pause * 2, _MAX_PAUSE)
        log.error("the semantic cache %s; starting it again in %g s", reason, pause)
        await asyncio.sleep(pause)


async def _run(line: bytes) -> int:
    """Its exit status, when it ends. Raises OSError when it cannot be started."""
    command = (sys.executable, "-P", "-m", "cache.semantic.service")
    async with running(command, stdin=asyncio.subprocess.PIPE, stop_deadline=_STOP_DEADLINE) as process:
        assert process.stdin is not None  # noqa: S101  # it was asked for
        with contextlib.suppress(ConnectionError):  # it has ended already; its status says why
            process.stdin.write(line)
            await process.stdin.drain()
        return await process.wait()
