"""Which settings of a running gateway can change, and which wait for its next start."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import asdict, replace

from gateway.settings.refusals import Path
from gateway.settings.settings import Settings

# What these describe is opened, started or listened on once.
_AT_START: tuple[Path, ...] = (
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


def _value(settings: Any, path: Path) -> Any:
    for name in path:
        settings = getattr(settings, name)
    return settings


def _with(settings: Any, path: Path, value: Any) -> Any:
    name, *rest = path
    inner = value if not rest else _with(getattr(settings, name), tuple(rest), value)
    return replace(settings, **{name: inner})


def changed(running: Settings, wanted: Settings) -> Sequence[str]:
    """The names of the groups that differ, for the log: values may be secret."""
    before, after = asdict(running), asdict(wanted)
    return [name for name in before if before[name] != after[name]]
