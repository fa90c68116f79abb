"""A directory for the sockets and counters of one gateway's processes, which leaves nothing behind after a kill."""

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_SOCKET_PATH = 103
"""Bytes of a Unix socket's path: 107 on Linux, 103 on macOS."""


@contextmanager
def runtime_directory(state: Path) -> Iterator[Path]:
    """A new directory under `state`, or under the temporary folder if `state` cannot be written; removed on exit.

    The process holds a lock on it. A directory whose lock is free belonged to a process that was killed, and is
    removed as well. Raises OSError if neither place can be written.
    """
    with contextlib.ExitStack() as stack:
        try:
            parent = _make(state / "run")
        except OSError:
            parent = _make(Path(tempfile.gettempdir()) / f"keepgate-{os.getuid()}")
        with _locked(parent):  # no other process looks at a directory before it is locked
            _remove_abandoned(parent)
            directory = Path(tempfile.mkdtemp(dir=parent))
            stack.enter_context(_locked(directory))
        stack.callback(_remove, directory)
        yield directory


@contextmanager
def socket_path(directory: Path, name: str) -> Iterator[Path]:
    """A path of the socket `name` in a directory that is short enough for every process of this host.

    On Linux a longer path is replaced by one through this process's open descriptor of the directory, valid for as
    long as the context. Raises ValueError, which says how long it may be, on other systems.
    """
    path = directory / name
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH:
        yield path
        return
    if sys.platform != "linux":
        raise ValueError(f"{path} is too long for a Unix socket; expected at most {MAX_SOCKET_PATH} bytes")
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}/{name}")
    finally:
        os.close(descriptor)


def _make(path: Path) -> Path:
    """The directory, for this user alone. Raises OSError if it cannot be written or belongs to another user."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if path.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077 or not os.access(path, os.W_OK):
        raise PermissionError(f"{path} is not writable by this user alone")
    return path


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which the system releases when the process ends."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_abandoned(parent: Path) -> None:
    for directory in parent.iterdir():
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)


def _remove(directory: Path) -> None:
    """Remove the directory, and its parent if that is empty."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()
