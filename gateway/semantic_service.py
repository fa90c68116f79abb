"""The process of the semantic cache as a child: one for all workers of a host, started again when it ends."""

import asyncio
import contextlib
import importlib.util
import logging
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from cache.semantic.embedding.folder import models_folder
from gateway.child import running
from gateway.settings import Settings, SettingsError
from gateway.tasks import background_tasks

log = logging.getLogger(__name__)

_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_STOP_DEADLINE = 5.0
# Exit status with which it ends after it has said itself what is wrong with a setting.
_SAID_WHY = 2


@asynccontextmanager
async def semantic_service(settings: Settings, redis: str) -> AsyncIterator[Path | None]:
    """The socket of a service that is kept running; None where the semantic cache is off.

    `redis` is the URL of the store that gateways share, "" for none. Raises SettingsError when the dependencies are
    not installed, or when the service refuses a setting.
    """
    if settings.semantic.mode == "off":
        yield None
        return
    _require(settings, redis)
    with tempfile.TemporaryDirectory(prefix="keepgate-semantic-") as folder:
        socket = Path(folder) / "s"
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
    """What cache/semantic/service/config.py describes."""
    said = msgspec.structs.asdict(settings.semantic)
    for field in ("mode", "deadline"):
        del said[field]
    return {
        **said,
        "judge_key": str(settings.semantic.judge_key or ""),
        "socket": str(socket),
        "redis": redis,
        "models": str(models_folder()),
        "log_level": settings.log_level,
    }


async def _supervise(line: bytes) -> None:
    """Keep it running. Raises SettingsError when it ends because of a setting."""
    command = (sys.executable, "-P", "-m", "cache.semantic.service")
    loop = asyncio.get_running_loop()
    pause = _FIRST_PAUSE
    while True:
        began = loop.time()
        async with running(command, stdin=asyncio.subprocess.PIPE, stop_deadline=_STOP_DEADLINE) as process:
            assert process.stdin is not None  # noqa: S101  # it was asked for
            with contextlib.suppress(ConnectionError):  # it has ended already; its status says why
                process.stdin.write(line)
                await process.stdin.drain()
            status = await process.wait()
        if status == _SAID_WHY:
            raise SettingsError  # it has said itself which setting
        pause = _FIRST_PAUSE if loop.time() - began > _LONGEST_PAUSE else min(pause * 2, _LONGEST_PAUSE)
        log.error("the semantic cache ended with status %s; starting it again in %g s", status, pause)
        await asyncio.sleep(pause)
