"""A disk that can be filled, and a clock that can be set, for some processes alone; and who listens on a port."""

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_step.c")
_DISK_SIZE = "64m"
_FILLING = "filling"
_BLOCK = bytes(2**16)
_LISTENS = "0A"  # as /proc/net/tcp says it


def listeners(port: int) -> int:
    """How many sockets listen on this port of 127.0.0.1: each worker has its own."""
    local = f"0100007F:{port:04X}"
    return sum(line.split()[1:4:2] == [local, _LISTENS] for line in Path("/proc/net/tcp").read_text().splitlines()[1:])


class CannotStage(Exception):
    """Something that is needed is not there; the message says what."""


class Clock:
    """The wall clock of the processes that are started with `variables` in their environment."""

    def __init__(self, folder: Path) -> None:
        """Raises CannotStage without a C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            raise CannotStage("a clock to set needs a C compiler")
        library, self._file = folder / "clock_step.so", folder / "clock_step"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _SOURCE], check=True)
        self._file.write_bytes(struct.pack("q", 0))
        self.variables: Mapping[str, str] = {"LD_PRELOAD": str(library), "CLOCK_STEP_FILE": str(self._file)}

    def step(self, seconds: int) -> None:
        """Set it to the machine's time and so much more."""
        with self._file.open("r+b") as file:  # the same file, which is mapped
            file.write(struct.pack("q", seconds * 10**9))


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A new folder on a disk of its own. Raises CannotStage where none can be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_SIZE}", "keepgate-chaos", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode:
        raise CannotStage("a small disk needs the right to mount one")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Leave no room on the disk of a folder."""
    file = folder / _FILLING
    try:
        with file.open("wb", buffering=0) as opened:
            try:
                while opened.write(_BLOCK) == len(_BLOCK):
                    pass
                while opened.write(b"\0"):
                    pass
            except OSError:
                os.fsync(opened.fileno())
        yield
    finally:
        file.unlink()
