"""The folders that a gateway writes to: whether it may, and whether there is room for what the settings allow."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache.semantic.embedding.model_files import models_folder
from gateway.commands.doctor.execution import in_thread
from gateway.commands.doctor.finding import Finding, in_units, ok, problem, warning
from gateway.settings.settings import Settings

# With less a store cannot even write its log.
_LEAST_FREE = 64 * 2**20
_PREFIX_DISK_BYTES = 4 * 2**30
# An append-only file grows to twice the data before it is written anew, beside the old one.
_COPIES_OF_STORE = 3
# A converted small model, built kernels and an embedding model's reference.
_CACHE_BYTES = 600 * 2**20


@dataclass(frozen=True, slots=True)
class _Folder:
    name: str
    path: Path
    asked: int
    """Bytes that the settings allow it to hold."""
    used: int
    """Bytes of them that it holds already."""
    setting: str
    """What moves it."""


async def check_disk(settings: Settings) -> list[Finding]:
    """The state folder, the user's cache, and files that settings name."""
    return await in_thread(lambda: [*map(_look, _folders(settings)), *_files(settings)])


def _folders(settings: Settings) -> Iterator[_Folder]:
    state = settings.state_path()
    asked = used = 0
    if settings.redis == "embedded":
        asked += _COPIES_OF_STORE * settings.cache.embedded_memory
        used += _size(state / "valkey")
    backend = settings.backend
    if not settings.upstreams and backend.prefix_disk is None and backend.prefix_sharing is not False:
        asked += _PREFIX_DISK_BYTES if backend.prefix_disk_size is None else backend.prefix_disk_size
        used += _size(state / "prefix")
    if settings.batches.enabled:
        asked += settings.batches.max_file
    yield _Folder("state folder", state, asked, min(used, asked), "state_dir (--state-dir)")
    if not settings.upstreams and backend.prefix_disk is not None:
        folder = Path(backend.prefix_disk).expanduser().absolute()
        size = _PREFIX_DISK_BYTES if backend.prefix_disk_size is None else backend.prefix_disk_size
        yield _Folder("prefix store", folder, size, min(_size(folder), size), "backend.prefix_disk")
    if not settings.upstreams or settings.semantic.mode != "off":
        cache = models_folder().parent
        yield _Folder("model cache", cache, _CACHE_BYTES, min(_size(cache), _CACHE_BYTES), "XDG_CACHE_HOME")


def _look(folder: _Folder) -> Finding:
    check, path = "disk", folder.path
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        return problem(
            check,
            f"{folder.name} {path}: {existing} is a file",
            f"name a folder with {folder.setting}, or move the file",
        )
    if (refusal := _refusal(existing)) is not None:
        return problem(
            check,
            f"{folder.name} {path}: {existing} cannot be written by {_user()}: {refusal}",
            f"give it to that user (chown), or name another folder with {folder.setting}",
        )
    free = shutil.disk_usage(existing).free
    more = max(0, folder.asked - folder.used)
    room = f"{in_units(free)} free, and the settings allow {in_units(more)} more" if more else f"{in_units(free)} free"
    if free < _LEAST_FREE:
        return problem(check, f"{folder.name} {path}: {room}", f"free space there, or move it with {folder.setting}")
    if free < more:
        return warning(
            check,
            f"{folder.name} {path}: {room}",
            f"free space there, move it with {folder.setting}, or lower"
            " cache.embedded_memory, backend.prefix_disk_size and batches.max_file",
        )
    state = "is writable" if existing == path else "can be made"
    return ok(check, f"{folder.name} {path} {state}; {room}")


def _files(settings: Settings) -> Iterator[Finding]:
    """Files that are appended to."""
    traces = settings.traces.file if settings.traces.exporter == "file" else None
    for setting, name in (("log.audit_file", settings.log.audit_file), ("traces.file", traces)):
        if name is None:
            continue
        file = Path(name).expanduser().absolute()
        place = file if file.exists() else file.parent
        if file.is_dir() or not os.access(place, os.W_OK):
            reason = "is a folder" if file.is_dir() else "cannot be written" if place.exists() else "is in no folder"
            yield problem("disk", f"{setting}: {file} {reason}", "name a file in a folder that this user may write to")
        else:
            yield ok("disk", f"{setting} {file} is writable")


def _refusal(folder: Path) -> str | None:
    """Why no file can be written to a folder, if so; one is, and removed."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def _size(folder: Path) -> int:
    """Bytes of the files below a folder; files that are being removed are left out."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _user() -> str:
    return f"user {os.getuid()}" if os.getuid() else "root"
