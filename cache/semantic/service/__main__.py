"""`python -m cache.semantic.service`: started by a gateway, configured by one line of JSON."""

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from cache.semantic.service.config import Config
from telemetry.logs import configure_logging
from telemetry.tracing.span import TracingUnavailable

_EXIT_CONFIG_ERROR = 2
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> int:
    """Serve until a signal; returns the exit status."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=Config)
    # Before numpy, FAISS and torch are imported: the service takes one core, the engine needs the others.
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    from cache.semantic.embedding.errors import ModelChanged, ModelUnusable

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until it is ready nothing learned can be lost
    configure_logging(config.log_format, config.log_level)
    logging.getLogger("faiss").setLevel(logging.WARNING)  # it logs which of its builds it tries
    try:
        uvloop.run(_serve(config))
    except (ModelUnusable, TracingUnavailable) as error:
        print(f"keepgate: {error}", file=sys.stderr)
        return _EXIT_CONFIG_ERROR
    except ExceptionGroup as errors:
        if errors.split(ModelChanged)[1] is not None:
            raise
        print("keepgate: the embedding server has another model than before; beginning anew", file=sys.stderr)
        return 1
    return 0


async def _serve(config: Config) -> None:
    from cache.semantic.embedding.load import load_encoder
    from cache.semantic.service.service import open_service

    async with open_service(config, lambda model, prompt: load_encoder(model, Path(config.models), prompt)):
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    sys.exit(main())
