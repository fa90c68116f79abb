"""A process's membership of a folder: it reads and writes files of frames, and records that in its journal."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable
from typing import NamedTuple

from prefix_store.frames.segments import Bytes, buffer
from prefix_store.tiers.cancellation import Cancelled, CancelToken
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.journal import Journal, Kind, Record
from prefix_store.tiers.disk.spares import Spares

_MAX_UNREAD_BYTES = 8 * 2**20
_NO_BLOCK = BlockName(bytes(16), bytes(16), False)


class FolderSession:
    """Reads and writes files of frames. Several threads may use it. Every method may raise OSError."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._journal = Journal(folder.journals)
        self._numbers = itertools.count()
        self._spares = Spares(folder)

    def is_current(self) -> bool:
        """Whether the folder is still there, with this process in it."""
        return self.folder.is_current() and self._journal.is_there()

    def has(self, name: BlockName) -> bool:
        """Whether a block has a file."""
        return os.path.exists(self.folder.block(name))

    def load(self, name: BlockName, into: Bytes) -> int:
        """Reads a file into memory; returns how many bytes it has, at most as many as fit. Raises FileNotFoundError.

        ``into`` is a `scratch`: one byte longer than a frame, so that a longer file is noticed.
        Read, not mapped: a mapped file that is truncated kills the process with SIGBUS.
        """
        file = os.open(self.folder.block(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            done = 0
            while done < len(into) - 1 and (read := os.readv(file, [into[done:].data])):
                done += read
            return done
        finally:
            os.close(file)

    def may_write(self, size: int) -> bool:
        """Whether there is space for so many bytes; else the evictor has to evict first."""
        return self._journal.may_write(size)

    def save(self, name: BlockName, frame: Bytes, cancel: CancelToken | None = None) -> None:
        """Writes a file under a temporary name, and renames it when it is complete.

        Args:
            cancel: frees the frame; of one that was freed before it was written no file is left. None: it is the
                caller's own.

        Raises:
            Cancelled, OSError: nothing was written.
        """
        if cancel is not None and cancel.is_set:
            raise Cancelled
        draft = self.folder.draft(f"{self._journal.name}.{next(self._numbers)}")
        try:
            new = 0 if self._spares.take(len(frame), draft) else os.O_CREAT | os.O_EXCL
            file = os.open(draft, os.O_WRONLY | new | os.O_CLOEXEC, 0o600)
            try:
                done = 0
                while done < len(frame):
                    done += os.write(file, frame[done:].data)
            finally:
                os.close(file)
            if cancel is not None and cancel.is_set:
                raise Cancelled
            rename_into(draft, self.folder.block(name))
        except (Cancelled, OSError):
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        try:
            self._journal.append(Record(Kind.WROTE, name, len(frame)))
        except OSError:
            # The evictor would know neither it nor its children, which it removes as blocks without a parent.
            with contextlib.suppress(OSError):
                os.unlink(self.folder.block(name))
            raise

    def used(self, name: BlockName, access: int, output_length: int | None) -> None:
        """Records a use of the chain that ends with this block."""
        with contextlib.suppress(FileNotFoundError):
            # A new evictor orders chains by these times.
            os.utime(self.folder.block(name))
        self._note(Record(Kind.USED, name, -1 if output_length is None else output_length, access))

    def ended(self, name: BlockName, access: int, output_length: int) -> None:
        """Records the output length of an access."""
        self._note(Record(Kind.ENDED, name, output_length, access))

    def discard(self, name: BlockName, notify: bool = True) -> None:
        """Removes a damaged file; with `notify` the evictor removes its descendants."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder.block(name))
        if notify:
            self._note(Record(Kind.GONE, name, 0))

    def pin(self, name: BlockName) -> None:
        """Pins a block and its ancestors."""
        put_pin(self.folder, name)
        self._note(Record(Kind.PINNED, name, 0))

    def unpin(self, names: Iterable[BlockName]) -> None:
        """Removes the pins of these blocks."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.pin(name))
                self._note(Record(Kind.PINNED, name, 0))

    def clear(self) -> int:
        """Removes the files of all blocks, and all pins; returns the number of blocks."""
        gone = 0
        for name in self.folder.pinned():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.pin(name))
        for block in self.folder.stored():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.block(block.name))
                gone += 1
        self._spares.clear()
        self._note(Record(Kind.CLEARED, _NO_BLOCK, 0))
        return gone

    def position(self) -> tuple[str, int]:
        """See `Journal.position`."""
        return self._journal.position()

    def is_read(self, said: tuple[str, int]) -> bool:
        """Whether the evictor has read up to this position."""
        return self._journal.is_read(said)

    def close(self) -> None:
        """Closes the journal."""
        self._journal.close()

    def _note(self, record: Record) -> None:
        # Without an evictor the journal would grow; uses are seen from the files' times then.
        if self._journal.size < _MAX_UNREAD_BYTES:
            self._journal.append(record)


def put_pin(folder: Folder, name: BlockName) -> None:
    """Raises OSError."""
    os.close(os.open(folder.pin(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def rename_into(draft: str, path: str) -> None:
    """Renames a file into a subfolder, which is made if there is none yet. Raises OSError."""
    try:
        os.rename(draft, path)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process has made it
            os.mkdir(os.path.dirname(path), 0o700)
        os.rename(draft, path)


def scratch(frame_bytes: int) -> Bytes:
    """Memory for a frame and one byte more, so that a longer file is noticed."""
    return buffer(frame_bytes + 1)


class Use(NamedTuple):
    """The number that an access has in this process, and the tokens of its answer, None: not known yet."""

    number: int
    output_length: int | None
