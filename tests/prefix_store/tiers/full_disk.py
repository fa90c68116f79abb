"""Disks that refuse writes for a while, by the means that the machine allows."""

import contextlib
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

Fault = Callable[[Path], AbstractContextManager[None]]


def may_mount() -> bool:
    """Whether this process may mount file systems, as root may outside of some containers."""
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@contextlib.contextmanager
def tmpfs(path: Path) -> Iterator[None]:
    """A small file system of its own at this path."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextlib.contextmanager
def folder(path: Path) -> Iterator[None]:
    """A plain folder."""
    path.mkdir()
    yield


@contextlib.contextmanager
def no_space(path: Path) -> Iterator[None]:
    """The file system has no byte left (ENOSPC)."""
    filler = path / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    try:
        yield
    finally:
        filler.unlink()


@contextlib.contextmanager
def no_permission(path: Path) -> Iterator[None]:
    """Creating files in the folder fails (EPERM for root, EACCES for others)."""
    writing = path / "kv" / "writing"
    if os.geteuid():
        writing.chmod(0o500)
    else:
        subprocess.run(["chattr", "+i", str(writing)], check=True)
    try:
        yield
    finally:
        if os.geteuid():
            writing.chmod(0o700)
        else:
            subprocess.run(["chattr", "-i", str(writing)], check=True)


def may_forbid() -> bool:
    """Whether `no_permission` works here: root is stopped by attributes only, which not every file system has."""
    if os.geteuid():
        return True
    with tempfile.TemporaryDirectory() as folder:
        return not any(subprocess.call(["chattr", sign, folder], stderr=subprocess.DEVNULL) for sign in ("+i", "-i"))


@contextlib.contextmanager
def small_files(path: Path) -> Iterator[None]:
    """No file of this process may have more than 300 bytes (EFBIG): each write stops in the middle of a frame."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def no_drafts(path: Path) -> Iterator[None]:
    """The folder in which frames are written was removed (ENOENT)."""
    shutil.rmtree(path / "kv" / "writing")
    try:
        yield
    finally:
        (path / "kv" / "writing").mkdir()


ANYWHERE: dict[str, Fault] = {"files-too-large": small_files, "folder-damaged": no_drafts}
if may_forbid():
    ANYWHERE["no-permission"] = no_permission
MOUNTED: dict[str, Fault] = {"disk-full": no_space} if may_mount() else {}
