"""Notices that a process runs out of memory while it can still refuse work."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

_INTERVAL = 0.1
_SHARE = 0.9
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NO_LIMIT = 2**60
"""Versions 1 of cgroups say no limit with a number near 2**63."""


class MemoryGuard:
    """Compares the resident memory of this process with a limit in bytes, at most every 100 ms.

    Where the system does not tell its memory, it is never `overloaded`.
    """

    def __init__(self, limit: int, statm: Path = Path("/proc/self/statm")) -> None:
        self.limit = limit
        self._statm = statm
        self._due = 0.0
        self._is_overloaded = False

    @property
    def overloaded(self) -> bool:
        """Whether new work that takes memory should be refused."""
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _INTERVAL
            self._is_overloaded = resident_bytes(self._statm) > self.limit
        return self._is_overloaded


def memory_limit(setting: int, processes: int = 1, root: Path = Path("/")) -> int:
    """The bytes that each of `processes` may use: the setting, or for 0 its part of nine tenths of what the container,
    or else the machine, has.
    """
    if setting:
        return setting
    limits = [*_cgroup_limits(root), *_machine_memory(root)]
    return round(min(limits, default=_NO_LIMIT) * _SHARE / processes)


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """The resident memory of this process; 0 where it is not told (proc(5))."""
    try:
        return int(statm.read_bytes().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def _cgroup_limits(root: Path) -> Iterable[int]:
    """The limits of the process's own cgroup and of those around it, in both versions (cgroups(7))."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may be the host's, which is not there; its own limit is at the base then.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(base):
                break
            yield from _number(place / name)


def _machine_memory(root: Path) -> Iterable[int]:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return
    yield from (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))


def _number(file: Path) -> Iterable[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return
    if text.isdecimal() and int(text) < _NO_LIMIT:
        yield int(text)
