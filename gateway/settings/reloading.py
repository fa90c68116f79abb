"""Which settings of a running gateway can change, and which wait for its next start."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from gateway.settings import refusals
from gateway.settings.settings import Settings

# What these describe is opened, started or listened on once.
_AT_START: tuple[refusals.Path, ...] = (
    ("host",),
    ("port",),
    ("workers",),
    ("model",),
    ("backend",),
    ("redis",),
    ("state_dir",),
    ("semantic",),
    ("batches",),
    ("traces",),
    ("encryption",),
    ("keys",),
    ("costs", "keep"),
    ("responses_ttl",),
    ("cache", "namespace"),
    ("cache", "memory"),
    ("cache", "redis_deadline"),
    ("cache", "embedded_memory"),
)


# What tells a file from what it was: a new one in its place, or a link to another, has another inode.
Stamp = tuple[int, int, int] | None


def stamp_of(file: Path | None) -> Stamp:
    """Changes with the file. None while it is not there, or for no file."""
    try:
        status = file.stat() if file is not None else None
    except OSError:  # it is being replaced
        return None
    return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size)


def reloaded(running: Settings, wanted: Settings) -> tuple[Settings, Sequence[str]]:
    """What a running gateway takes over of new settings, and the names of those that wait for its next start."""
    waiting: list[str] = []
    for path in _AT_START:
        before = _value(running, path)
        if _value(wanted, path) != before:
            waiting.append(".".join(path))
            wanted = _with(wanted, path, before)
    if bool(wanted.upstreams) != bool(running.upstreams):  # with none the in-repo backend runs
        waiting.append("upstreams")
        wanted = replace(wanted, upstreams=running.upstreams)
    return wanted, waiting


def _value(settings: Any, path: refusals.Path) -> Any:
    for name in path:
        settings = getattr(settings, name)
    return settings


def _with(settings: Any, path: refusals.Path, value: Any) -> Any:
    name, *rest = path
    inner = value if not rest else _with(getattr(settings, name), tuple(rest), value)
    return replace(settings, **{name: inner})


def changed(running: Settings, wanted: Settings) -> Sequence[str]:
    """The names of the groups that differ, for the log: values may be secret."""
    before, after = asdict(running), asdict(wanted)
    return [name for name in before if before[name] != after[name]]
