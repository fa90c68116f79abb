"""One process's place in a folder: the files that it reads and writes, and the journal in which it says so."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable

from prefix_store.frames.buffer import buffer
from prefix_store.frames.segments import Bytes
from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.folder import Folder
from prefix_store.tiers.disk.journal import Journal, Kind, Record

_MOST_UNREAD_BYTES = 8 * 2**20
_NO_BLOCK = BlockName(bytes(16), bytes(16), False)


class Membership:
    """Reads and writes files of frames. Several threads may use it. Every method may raise OSError."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._journal = Journal(folder.journals)
        self._numbers = itertools.count()

    def is_current(self) -> bool:
        """Whether the folder is still there, with this process in it."""
        return self.folder.is_current() and self._journal.is_there()

    def has(self, name: BlockName) -> bool:
        """Whether a block has a file."""
        return os.path.exists(self.folder.block(name))

    def load(self, name: BlockName, into: Bytes) -> int:
        """Reads a file into memory; returns how many bytes it has, at most as many as fit. Raises FileNotFoundError.

        ``into`` is a `scratch`: where only its last byte is left there was no more to read, and nobody asks again.
        By calls that read, and not as mapped memory: who touches that after somebody has cut the file is killed.
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
        """Whether there is room for so many bytes, or the keeper has to make it first."""
        return self._journal.may_write(size)

    def save(self, name: BlockName, frame: Bytes) -> None:
        """Writes a file. It has its name only when it is whole."""
        draft = self.folder.draft(f"{self._journal.name}.{next(self._numbers)}")
        try:
            file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                done = 0
                while done < len(frame):
                    done += os.write(file, frame[done:].data)
            finally:
                os.close(file)
            put_in_place(draft, self.folder.block(name))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        self._journal.append(Record(Kind.WROTE, name, len(frame)))

    def used(self, name: BlockName, access: int, output_length: int | None) -> None:
        """Says that a chain which ends with this block was used, by an access that has a number here."""
        with contextlib.suppress(FileNotFoundError):
            # What a keeper that begins anew goes by.
            os.utime(self.folder.block(name))
        self._note(Record(Kind.USED, name, -1 if output_length is None else output_length, access))

    def ended(self, name: BlockName, access: int, output_length: int) -> None:
        """Says how many tokens the answer had that an access was for."""
        self._note(Record(Kind.ENDED, name, output_length, access))

    def discard(self, name: BlockName, tells: bool = True) -> None:
        """Removes a file that is not what it should be; has the keeper remove what follows it, if it is told."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder.block(name))
        if tells:
            self._note(Record(Kind.GONE, name, 0))

    def pin(self, name: BlockName) -> None:
        """Says that a block, and what it follows, must stay."""
        put_pin(self.folder, name)
        self._note(Record(Kind.PINNED, name, 0))

    def unpin(self, names: Iterable[BlockName]) -> None:
        """Takes that back, of each of these blocks of which it was said."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.pin(name))
                self._note(Record(Kind.PINNED, name, 0))

    def clear(self) -> int:
        """Removes the files of all blocks, and all pins; returns how many blocks it were."""
        gone = 0
        for name in self.folder.pinned():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.pin(name))
        for block in self.folder.stored():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.folder.block(block.name))
                gone += 1
        self._note(Record(Kind.CLEARED, _NO_BLOCK, 0))
        return gone

    def said_so_far(self) -> tuple[str, int]:
        """See `Journal.said_so_far`."""
        return self._journal.said_so_far()

    def is_heard(self, said: tuple[str, int]) -> bool:
        """Whether the keeper has read all that."""
        return self._journal.is_heard(said)

    def close(self) -> None:
        """Leaves what it has written to the keeper."""
        self._journal.close()

    def _note(self, record: Record) -> None:
        # Without a keeper nobody reads; what was used then is seen from the files' times.
        if self._journal.size < _MOST_UNREAD_BYTES:
            self._journal.append(record)


def put_pin(folder: Folder, name: BlockName) -> None:
    """Raises OSError."""
    os.close(os.open(folder.pin(name), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def put_in_place(draft: str, path: str) -> None:
    """Renames a file into a subfolder, which is made where there is none yet. Raises OSError."""
    try:
        os.rename(draft, path)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):  # another process made it meanwhile
            os.mkdir(os.path.dirname(path), 0o700)
        os.rename(draft, path)


def scratch(frame_bytes: int) -> Bytes:
    """Memory for a frame and one byte more, so that a file that is too long shows."""
    return buffer(frame_bytes + 1)
