"""Faults of disks and threads."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.prefix_store.connectors.paged_engine.engine import PagedEngine
from tests.prefix_store.connectors.paged_engine.workers import Rank


def files_of(engine: PagedEngine, tokens: list[int], salt: str | None = None, rank: int = 0) -> list[Path]:
    """The files of a prompt's blocks on disk, in order, of one worker's part."""
    folder = engine.setup.store.disk
    assert folder is not None
    names = engine.workers.ranks[rank].names
    keys = [names.of(block).key.hex() for block in engine.chain(tokens, salt)]
    return [next(folder.glob(f"blocks/*/{key}-*")) for key in keys]


def flip(file: Path) -> None:
    """One bit of the numbers."""
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)


def wait_until(condition: Callable[[], bool]) -> None:
    """Returns when the store's thread has come that far; raises AssertionError if it never does."""
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def hanging(file: Path) -> Iterator[None]:
    """Whoever opens the file waits until the end of this."""
    file.unlink()
    os.mkfifo(file)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(file, os.O_RDWR | os.O_NONBLOCK))
            file.unlink()


@contextmanager
def blocked_loop(rank: Rank) -> Iterator[None]:
    """The event loop of a worker's store stands still."""
    is_blocked, go_on = threading.Event(), threading.Event()

    async def block() -> None:
        is_blocked.set()
        go_on.wait(60)

    rank.thread.begin(block())
    assert is_blocked.wait(10)
    try:
        yield
    finally:
        go_on.set()
