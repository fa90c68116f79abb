"""The journal of a process: an append-only file of records for the evictor, with a head that the evictor writes.

offset 0    8 bytes  how far the evictor has read, in bytes of this file
offset 8    8 bytes  how many bytes of frames the process may write beyond that
offset 16            records of 56 bytes

The writer holds a lock on it. The evictor reads the journal of an ended process to its end, and removes it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import struct
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from prefix_store.tiers.disk.block_name import BlockName

HEAD_BYTES = 16
_HEAD = struct.Struct("<QQ")
_RECORD = struct.Struct("<B?2xI16s16sq")
_CHECKSUM = struct.Struct("<Q")
RECORD_BYTES = _RECORD.size + _CHECKSUM.size
_FRESH = "fresh."
_ROTATE_BYTES = 2**20


class Kind(enum.IntEnum):
    """What a record is about."""

    WROTE = 1
    """A block of `number` bytes has a file now."""
    USED = 2
    """A chain that ends with this block was used by access `access`; `number` is its output length, -1: not known."""
    ENDED = 3
    """`access`, whose chain ended with this block, has the output length `number`."""
    GONE = 4
    """A block's file was damaged, and has been removed."""
    PINNED = 5
    """A pin of this block has been put into the folder or taken out of it."""
    CLEARED = 6
    """Every file has been removed; the name is of no block."""


class Record(NamedTuple):
    """One record. Access numbers are local to a journal."""

    kind: Kind
    name: BlockName
    number: int
    access: int = 0

    def pack(self) -> bytes:
        """56 bytes."""
        said = _RECORD.pack(self.kind, self.name.is_first, self.access, self.name.key, self.name.parent, self.number)
        return said + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(said))

    @classmethod
    def unpack(cls, data: bytes) -> Record | None:
        """None if these bytes are no record."""
        said = data[: _RECORD.size]
        if _CHECKSUM.pack(xxhash.xxh3_64_intdigest(said)) != data[_RECORD.size :]:
            return None
        kind, is_first, access, key, parent, number = _RECORD.unpack(said)
        if kind not in Kind.__members__.values():
            return None
        return cls(Kind(kind), BlockName(key, parent, is_first), number, access)


class Journal:
    """The writing side. Several threads may use it. Every method but `close` may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, int]] = deque()
        self._file = -1
        self._begin()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    def append(self, *records: Record) -> None:
        """Adds records, or none of them if it fails."""
        data = b"".join(record.pack() for record in records)
        with self._opened() as file:
            try:
                _write_all(file, data, self._end)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, self._end)
                raise
            for place, record in enumerate(records, 1):
                if record.kind is Kind.WROTE:
                    self._waiting.append((self._end + place * RECORD_BYTES, record.number))
            self._end += len(data)

    def may_write(self, size: int) -> bool:
        """Whether a frame of this many bytes may be written now.

        Starts a new file if this one is long and has been read; so call it before writing a draft.
        """
        with self._opened() as file:
            read, allowed = _HEAD.unpack(os.pread(file, HEAD_BYTES, 0))
            while self._waiting and self._waiting[0][0] <= read:
                self._waiting.popleft()
            if self._end > _ROTATE_BYTES and read >= self._end:
                self._begin()
                os.close(file)
                return False
            waiting = sum(bytes_ for _, bytes_ in self._waiting)
            return bool(waiting + size <= allowed)

    def position(self) -> tuple[str, int]:
        """The present end of the journal, for `is_read`: file name and bytes."""
        with self._opened():
            return self.name, self._end

    def is_read(self, said: tuple[str, int]) -> bool:
        """Whether the evictor has read up to this position."""
        name, end = said
        with self._opened() as file:
            read, _ = _HEAD.unpack(os.pread(file, HEAD_BYTES, 0))
            # A new file is started only when the previous one has been read.
            return bool(name != self.name or read >= end)

    def is_there(self) -> bool:
        """Whether the file still has a name, under which the evictor finds it."""
        with self._opened() as file:
            return os.fstat(file).st_nlink > 0

    def close(self) -> None:
        """Closes the file; the evictor removes it."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The file descriptor, under the lock: a closed one could be reused for another file."""
        with self._lock:
            if self._file < 0:
                raise OSError(errno.EBADF, "this process has left the folder", str(self._folder))
            yield self._file

    def _begin(self) -> None:
        name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        fresh = self._folder / (_FRESH + name)
        file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Locked before it gets its name: an unlocked journal counts as that of an ended process.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(file, _HEAD.pack(HEAD_BYTES, 0), 0)
            fresh.rename(self._folder / name)
        except OSError:
            os.close(file)
            raise
        self.name, self._file, self._end = name, file, HEAD_BYTES


class JournalReader:
    """The evictor's side of a journal. One thread uses it."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._position = max(HEAD_BYTES, _HEAD.unpack(os.pread(self._file, HEAD_BYTES, 0).ljust(HEAD_BYTES, b"\0"))[0])
        self.is_broken = False
        """Whether a record was damaged; the folder is scanned then."""

    def read(self) -> list[Record]:
        """New records, in order. Raises OSError."""
        records: list[Record] = []
        while data := os.pread(self._file, RECORD_BYTES * 1024, self._position):
            whole = len(data) // RECORD_BYTES * RECORD_BYTES
            for start in range(0, whole, RECORD_BYTES):
                record = Record.unpack(data[start : start + RECORD_BYTES])
                if record is None:
                    self.is_broken = True
                else:
                    records.append(record)
            self._position += whole
            if whole < len(data):
                break
        return records

    def write_progress(self, allowed: int) -> None:
        """Writes how far it has been read, and how many bytes of frames may be written beyond. Raises OSError."""
        _write_all(self._file, _HEAD.pack(self._position, allowed), 0)

    def is_abandoned(self) -> bool:
        """Whether its writer has ended."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def journals_in(folder: Path) -> list[str]:
    """The names of all journals, of running and ended processes. Raises OSError."""
    return [name for name in os.listdir(folder) if not name.startswith(_FRESH)]


def _write_all(file: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written
