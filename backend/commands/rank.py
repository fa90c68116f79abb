"""The process of one rank of an engine that is computed in parallel; the engine starts it, with a socket."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from backend.runners.parallel.messages import (
    BEAT_SECONDS,
    Beat,
    Channel,
    Connect,
    Connected,
    Loaded,
    MoveKv,
    RankError,
    RankJob,
)

logger = logging.getLogger(__name__)


def main() -> None:
    """Computes steps until rank 0 closes the socket, whose file descriptor is the only argument."""
    # A service manager sends these to all processes: rank 0 decides when the others end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    # Before torch is imported, so that rank 0 hears of this process from the beginning.
    threading.Thread(target=_beat, args=(channel,), name="beat", daemon=True).start()
    try:
        _compute(channel)
    except (EOFError, ConnectionError):
        _end(0)
    except Exception as error:  # noqa: BLE001 - rank 0 is told
        with contextlib.suppress(OSError):  # rank 0 is gone
            channel.send(_error(error))
        _end(1)


def _end(status: int) -> NoReturn:
    """Not by the interpreter's end, for threads of gloo may wait for ranks that are gone; and while the exception holds
    what was computed with, for to free NCCL's groups waits until all recordings of them are freed.
    """
    sys.stderr.flush()
    os._exit(status)


def _compute(channel: Channel) -> None:
    job: RankJob = channel.receive()
    import torch

    from backend.model import load_part
    from backend.runners.parallel.parts import build_part, check_part, connect

    torch.set_num_threads(job.settings.threads)
    weights, summary = load_part(job.directory, job.config, job.part, job.settings.quantization)
    if job.settings.is_on_devices:
        check_part(job, weights)
    channel.send(Loaded(summary))
    now = channel.receive()
    assert isinstance(now, Connect)  # noqa: S101 - what rank 0 sends next
    runner = build_part(job, weights, connect(job), lambda sentence: None)
    del weights  # a device has its own
    channel.send(Connected())
    while True:
        match channel.receive():
            case MoveKv() as message:
                runner.move_kv(message.moves)
            case step:
                runner.run(step)


def _error(error: Exception) -> RankError:
    from backend.errors import ModelError
    from backend.runners.parallel.communicator import PeerLost

    if isinstance(error, PeerLost):
        return RankError(str(error), is_peer_lost=True)
    if isinstance(error, ModelError):
        return RankError(str(error), is_peer_lost=False)
    logger.error("the rank cannot go on", exc_info=error)
    return RankError(f"{type(error).__name__}: {error}", is_peer_lost=False)


def _beat(channel: Channel) -> None:
    """Tells rank 0 that this process runs, and ends it when rank 0 is gone, whatever it waits for."""
    while True:
        try:
            channel.send(Beat())
        except OSError:
            os._exit(0)
        time.sleep(BEAT_SECONDS)


if __name__ == "__main__":
    main()
