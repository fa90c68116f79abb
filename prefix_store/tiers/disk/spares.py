"""Files of evicted blocks, which are written over: what a file has in the page cache and on disk is not made anew."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.folder import Folder

_MOST_FILES = 64
"""They are listed for each block that is written."""


class Spares:
    """The spare files of a folder. The evictor makes and limits them, writers of all processes take them."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._room = self._files_room = 0

    def limit(self, most_bytes: int) -> None:
        """Removes what is beyond so many bytes or 64 files; as many may be kept from now on. Raises OSError."""
        self._room, self._files_room = most_bytes, _MOST_FILES
        for path, size in self._files():
            if not self._has_room(size):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def keep(self, name: BlockName) -> None:
        """Makes the file of a block a spare one, or removes it if there is no room. Raises OSError."""
        path = self._folder.block(name)
        with contextlib.suppress(FileNotFoundError):  # the block, or the folder for spare files
            if self._has_room(size := os.stat(path).st_size):
                os.rename(path, self._folder.spare(f"{size}.{name.base()}"))
                return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def take(self, size: int, draft: str) -> bool:
        """Renames a spare file of this size; False: there is none."""
        for path, found in self._files():
            if found == size:
                with contextlib.suppress(FileNotFoundError):  # another writer was faster
                    os.rename(path, draft)
                    return True
        return False

    def clear(self) -> None:
        """Removes all. Raises OSError."""
        for path, _ in self._files():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _has_room(self, size: int) -> bool:
        """Whether one more fits, which is counted then."""
        if size > self._room or not self._files_room:
            return False
        self._room -= size
        self._files_room -= 1
        return True

    def _files(self) -> Iterator[tuple[str, int]]:
        with contextlib.suppress(FileNotFoundError):
            for file in os.listdir(self._folder.spares):
                size, dot, _ = file.partition(".")
                if dot and size.isdecimal():
                    yield self._folder.spare(file), int(size)
