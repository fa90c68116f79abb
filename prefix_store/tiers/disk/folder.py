"""The folder of a disk tier: its identity, and the names of what is in it."""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from prefix_store.tiers.disk.block_name import BlockName

_IDENTITY = "identity"
_LINE = re.compile(r"keepgate kv blocks, version 1, ([0-9a-f-]{36})\n")
_NAMES = {_IDENTITY, "evictor.lock", "blocks", "writing", "journals", "pins", "spare", "lost+found"}


class StoredBlock(NamedTuple):
    """A file in blocks/: its name, its size in bytes, and when it was written or last used at the end of a chain.

    An empty one, which a power cut may leave, counts as one byte until a reader finds it damaged.
    """

    name: BlockName
    size: int
    used: float


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the disk tier. ``identity`` is its UUID, ``inode`` that of its identity file."""

    path: Path
    identity: str
    inode: int

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Opens a folder, and makes it if it is missing or empty. Raises FolderUnusable, or another OSError."""
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700, parents=True)
        return cls.find(path)

    @classmethod
    def find(cls, path: Path) -> Folder:
        """As `open`, but a missing folder is not made: it may be the mount point of a disk that comes back."""
        identity = path / _IDENTITY
        if not identity.exists():
            foreign = [name for name in os.listdir(path) if name not in _NAMES and not name.startswith(_IDENTITY)]
            if foreign:
                raise FolderUnusable(f"{path} is not a folder of KV blocks: it has {foreign[0]!r}; give an empty one")
            # Linked, not renamed: of processes that start together the first one sets the identity.
            draft = path / f"{_IDENTITY}.{uuid.uuid4()}"
            draft.write_text(f"keepgate kv blocks, version 1, {uuid.uuid4()}\n", encoding="ascii")
            with contextlib.suppress(FileExistsError):
                identity.hardlink_to(draft)
            draft.unlink()
        said = _LINE.fullmatch(identity.read_bytes()[:200].decode("ascii", "replace"))
        if said is None:
            raise FolderUnusable(f"{identity} does not name a folder of KV blocks of version 1; give an empty folder")
        for name in ("blocks", "writing", "journals", "pins", "spare"):
            (path / name).mkdir(0o700, exist_ok=True)
        return cls(path, said[1], identity.stat().st_ino)

    def is_current(self) -> bool:
        """Whether the folder at this path is still this one."""
        try:
            return (self.path / _IDENTITY).stat().st_ino == self.inode
        except OSError:
            return False

    def block(self, name: BlockName) -> str:
        """Path of a block's file."""
        return f"{self.path}/blocks/{name.file()}"

    def draft(self, name: str) -> str:
        """Path of a file that is being written."""
        return f"{self.path}/writing/{name}"

    def spare(self, name: str) -> str:
        """Path of a file that may be written over."""
        return f"{self.path}/spare/{name}"

    def pin(self, name: BlockName) -> str:
        """Path of the file that pins a block."""
        return f"{self.path}/pins/{name.base()}"

    def pinned(self) -> list[BlockName]:
        """The blocks that have a pin. Raises OSError."""
        try:
            files = sorted(os.listdir(self.pins))
        except FileNotFoundError:
            return []  # it was removed; eviction goes on
        return [name for file in files if (name := BlockName.of(file))]

    @property
    def pins(self) -> Path:
        """Where the pins are."""
        return self.path / "pins"

    @property
    def evictor(self) -> Path:
        """The file on which the evictor holds a lock."""
        return self.path / "evictor.lock"

    @property
    def journals(self) -> Path:
        """Where the journals are."""
        return self.path / "journals"

    @property
    def drafts(self) -> Path:
        """Where frames are written."""
        return self.path / "writing"

    @property
    def spares(self) -> Path:
        """Where files are that may be written over."""
        return self.path / "spare"

    def stored(self) -> Iterator[StoredBlock]:
        """Every stored block, in no order; other files are skipped. Raises OSError."""
        for part in os.listdir(self.path / "blocks"):
            with (
                contextlib.suppress(NotADirectoryError, FileNotFoundError),
                os.scandir(self.path / "blocks" / part) as found,
            ):
                for file in found:
                    if name := BlockName.of(file.name):
                        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                            about = file.stat(follow_symlinks=False)
                            yield StoredBlock(name, max(1, about.st_size), about.st_mtime)

    def blocks_in(self, part: str, known: Mapping[BlockName, int]) -> dict[BlockName, int]:
        """Bytes of every block in a subfolder; known sizes are not read again. Raises OSError."""
        sizes: dict[BlockName, int] = {}
        with os.scandir(self.path / "blocks" / part) as found:
            for file in found:
                if name := BlockName.of(file.name):
                    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                        sizes[name] = known.get(name) or file.stat(follow_symlinks=False).st_size
        return sizes


class FolderUnusable(OSError):
    """The folder is missing or has other contents; the message says which, and what is expected."""
