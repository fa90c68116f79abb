"""Objects on disk, a folder each. They appear and disappear whole, whatever kills the process meanwhile.

Everything here blocks, and is called in threads.
"""

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_DRAFTS = "drafts"  # no namespace is called so


def new_id(prefix: str) -> str:
    """An identifier; those of later objects sort behind it."""
    return id_at(prefix, time.time_ns() // 1000, secrets.token_bytes(9))


def id_at(prefix: str, microseconds: int, tail: bytes) -> str:
    """The identifier of an object made at this Unix time; `tail`, of 9 bytes, tells it from others of that time."""
    return f"{prefix}{microseconds:014x}{tail.hex()}"


def is_id(prefix: str, text: str) -> bool:
    return re.fullmatch(re.escape(prefix) + "[0-9a-f]{32}", text) is not None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list, and whether more follows."""

    data: list[T]
    has_more: bool


def page_of(
    ids: Iterable[str], read: Callable[[str], T | None], limit: int, after: str | None, newest_first: bool
) -> Page[T]:
    """Up to `limit` objects behind the identifier `after`; those for which `read` gives None are left out."""
    found: list[T] = []
    for each in sorted(ids, reverse=newest_first):
        if after is not None and (each >= after if newest_first else each <= after):
            continue
        if (item := read(each)) is None:
            continue
        if len(found) == limit:
            return Page(found, has_more=True)
        found.append(item)
    return Page(found, has_more=False)


class Folders:
    """The folders `<root>/<namespace>/<id>`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._drafts = root / _DRAFTS

    def path(self, namespace: str, each: str) -> Path:
        return self._root / namespace / each

    def ids(self, namespace: str) -> list[str]:
        try:
            return os.listdir(self._root / namespace)
        except FileNotFoundError:
            return []

    def all(self) -> list[tuple[str, str]]:
        """Namespace and identifier of every object."""
        try:
            namespaces = os.listdir(self._root)
        except FileNotFoundError:
            return []
        return [(namespace, each) for namespace in namespaces if namespace != _DRAFTS for each in self.ids(namespace)]

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A new folder, which `publish` turns into an object; without that it is removed. Raises OSError."""
        _make_private(self._drafts)
        with contextlib.ExitStack() as stack:
            with _locked(self._drafts):  # no other process looks at a draft before it is locked
                draft = Path(tempfile.mkdtemp(dir=self._drafts))
                stack.enter_context(_locked(draft))
            stack.callback(shutil.rmtree, draft, ignore_errors=True)
            yield draft

    def publish(self, draft: Path, namespace: str, each: str) -> None:
        """Turn a folder into an object; its files have been synced. Raises OSError, also where there is one already."""
        _make_private(self._root / namespace)
        sync_folder(draft)
        draft.rename(self.path(namespace, each))
        sync_folder(self._root / namespace)

    def move(self, namespace: str, each: str, to: "Folders") -> None:
        """Make it one of `to`. Raises OSError."""
        _make_private(to._root / namespace)
        self.path(namespace, each).rename(to.path(namespace, each))
        sync_folder(to._root / namespace)
        sync_folder(self._root / namespace)

    def remove(self, namespace: str, each: str) -> None:
        """Raises FileNotFoundError if it is not there."""
        with self.draft() as grave:
            self.path(namespace, each).rename(grave / each)
            sync_folder(self._root / namespace)

    def remove_abandoned(self) -> None:
        """Remove the drafts of processes that were killed."""
        if not self._drafts.is_dir():
            return
        with _locked(self._drafts):
            for draft in self._drafts.iterdir():
                with contextlib.suppress(BlockingIOError), _locked(draft, fcntl.LOCK_NB):
                    shutil.rmtree(draft, ignore_errors=True)


def write_durably(path: Path, data: bytes) -> None:
    """Write a file for this user alone, in place of one that may be there. It holds what it held, or all of `data`.

    Only one at a time may write it. Raises OSError.
    """
    temporary = path.with_name(f".{path.name}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of `data` to an unbuffered file, which may take it in parts. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path, flags: int = 0) -> Iterator[None]:
    """Hold the folder's lock, which the system releases when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | flags)
        yield
    finally:
        os.close(descriptor)


def _make_private(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
