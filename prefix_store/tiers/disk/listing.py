"""What is in a folder, found by the thread that looks after it, a little at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from prefix_store.tiers.disk.block_name import BlockName
from prefix_store.tiers.disk.folder import Folder

_BLOCKS_AT_ONCE = 500
_YOUNG_SECONDS = 2.0


class Listed(NamedTuple):
    """Stored keys of all blocks that can be reached, parents before children, as it was at `began` or later."""

    began: float
    """Monotonic seconds."""
    keys: dict[bytes, None]


@dataclass(slots=True)
class _Part:
    """A subfolder, and when it had last changed as it was read; -1: it may have changed in that moment."""

    changed: int = -1
    blocks: dict[BlockName, int] = field(default_factory=dict)


class Listing:
    """Looks through a folder again and again. What has not changed since is not read again. One thread uses it.

    Files of another size than `frame_bytes` are of another format, and not in it.
    """

    def __init__(self, folder: Folder, frame_bytes: int) -> None:
        self._folder = folder
        self._frame_bytes = frame_bytes
        self._parts: dict[str, _Part] = {}

    def look(self) -> Iterator[Listed | None]:
        """The steps of one look, of about a millisecond each; what was found comes last. Each may raise OSError."""
        began = time.monotonic()
        blocks = self._folder.path / "blocks"
        names = os.listdir(blocks)
        for gone in self._parts.keys() - set(names):
            del self._parts[gone]
        for name in names:
            self._read(name)
            yield None
        keys: dict[bytes, None] = {}
        for count, _ in enumerate(self._place(keys), 1):
            if not count % _BLOCKS_AT_ONCE:
                yield None
        yield Listed(began, keys)

    def _read(self, name: str) -> None:
        path = self._folder.path / "blocks" / name
        part = self._parts.setdefault(name, _Part())
        try:
            changed = path.stat().st_mtime_ns
            if changed == part.changed:
                return
            # The clock of a file system is coarse: of what has just changed, the next change may not be seen.
            is_young = time.time() - changed / 1e9 < _YOUNG_SECONDS
            part.blocks = self._folder.blocks_in(name, known=part.blocks)
            part.changed = -1 if is_young else changed
        except (FileNotFoundError, NotADirectoryError):
            self._parts.pop(name, None)

    def _place(self, placed: dict[bytes, None]) -> Iterator[None]:
        """Adds the blocks whose parents are there, each after its own."""
        found: dict[bytes, BlockName] = {}
        for part in self._parts.values():
            for name, size in part.blocks.items():
                if size == self._frame_bytes:
                    found[name.key] = name
                yield
        for name in found.values():
            chain: list[BlockName] = []
            above: BlockName | None = name
            while above is not None and above.key not in placed and len(chain) < len(found):
                chain.append(above)
                above = None if above.is_first else found.get(above.parent)
            if chain and (chain[-1].is_first or chain[-1].parent in placed):
                placed.update((reached.key, None) for reached in reversed(chain))
            yield
